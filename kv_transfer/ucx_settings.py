"""UCX's settings, which are environment variables: those that we set, and how they are described.

UCX reads them when NIXL is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

_ALWAYS: Final = {
    # Else UCX waits in `connect`, and this thread with it, for a peer that is not there: as
    # long as TCP tries, two minutes.
    "UCX_TCP_CONN_NB": "y",
}
_ON_GPU: Final = {
    # Without it reads between GPUs that have no NVLink go over TCP, at a hundredth of the speed.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # A read that no transport has must fail: UCX would emulate it, slowly, and say nothing.
    "UCX_PROTO_EMULATION_ENABLE": "n",
}


def set_unset(*, on_gpu: bool) -> None:
    """Set the variables that the user has not set. Call it before NIXL is imported.

    `on_gpu` is whether the memory that is transferred is a GPU's.
    """
    for name, value in (_ALWAYS | _ON_GPU if on_gpu else _ALWAYS).items():
        os.environ.setdefault(name, value)


def describe_transports(*, on_gpu: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Describe the transports that UCX may choose from: UCX_TLS or ``all``; on a GPU also ours."""
    said = [environment.get("UCX_TLS", "all")]
    if on_gpu:
        said += [f"{name}={environment.get(name, '')}" for name in _ON_GPU]
    return " ".join(said)
