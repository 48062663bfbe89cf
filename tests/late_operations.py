"""torch's operations as a GPU runs them: Python has long gone on when they do.

A `LateStream` runs pieces of Python late. Here Python runs at once, as on a CUDA stream; what it
computes with tensors is queued, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from kvrelay.device.device_streams import DeviceStream
from tests.late_device import SPOILT


class LateOperations(TorchDispatchMode):
    """Queues what is computed within it; a result holds nonsense until its operation has run.

    Views, and tensors that are made of no other ones, are there at once. To read a number is not
    possible: the host would wait for it.

    Args:
        stream: runs the operations.
    """

    def __init__(self, stream: DeviceStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
        with self:  # in inference mode an operation made of others, such as `to`, comes whole
            made = func.decompose(*args, **options)
        if made is not NotImplemented:
            return made
        run, aliases = partial(func, *args, **options), [r.alias_info for r in func._schema.returns]
        has_inputs = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, options)))
        if not has_inputs or any(alias is not None and not alias.is_write for alias in aliases):
            return run()
        if any(alias is not None for alias in aliases):
            self._stream.launch(run)
            return args[0]
        with _disable_current_modes():
            shapes = tree_map_only(torch.Tensor, lambda one: one.to("meta"), (args, options))
            like = func(*shapes[0], **shapes[1])
            result = torch.empty(like.shape, dtype=like.dtype)
            result.view(torch.uint8).fill_(SPOILT)
        self._stream.launch(partial(_fill, result, run))
        return result


def _fill(result: torch.Tensor, run: Callable[[], torch.Tensor]) -> None:
    result.copy_(run())
