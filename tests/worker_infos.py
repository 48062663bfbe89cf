"""What a worker would say of itself, where nobody calls it."""

from __future__ import annotations

from typing import Any

from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


def worker_info(name: str = "decode-0", life: int = 1, **more: Any) -> WorkerInfo:
    """A worker of the role that its name begins with, in its so-many-th life.

    Args:
        more: Fields of `WorkerInfo` that matter to the test.
    """
    fields: dict[str, Any] = {
        "incarnation": f"{name}-{life}",
        "address": "127.0.0.1:1",
        "metrics_address": "127.0.0.1:2",
        "pool_tokens": 16,
        "max_model_len": 16,
        "vocab_size": 16,
        "architecture": "none",
        "eos_token_ids": (),
        "model": NO_MODEL,
        "version": VERSION,
    }
    if "role" not in more:  # some workers are called otherwise
        fields["role"] = WorkerRole(name.partition("-")[0])
    return WorkerInfo(name=name, **(fields | more))
