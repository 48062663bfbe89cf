"""The values that a worker's options have on its device, if nobody gave them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.model_runner.torch_options import parse_device
from kvrelay.options.memory_share import MemoryShare

logger = logging.getLogger(__name__)

_MAX_RUNNING: Final = 256
"""The requests of a step of decode by which an H100 or H200 is about busy."""
_CHUNKS: Final = ((128 << 30, 8192), (64 << 30, 4096), (0, 2048))
"""Pairs of a worker's least memory in bytes, and the most prompt tokens of a step from there on.

`--kv-memory auto` leaves room for the logits of such a step. With a vocabulary of 128 k they take
3 % of 64 or 128 GiB.
"""


def with_device_defaults(config: WorkerConfig) -> WorkerConfig:
    """Give the options that were left to the device their values there. Blocks.

    Raises:
        UnsupportedOptionError: there is no such device.
    """
    device = parse_device(config.device)
    if device.type != "cuda" or not config.left_to_device:
        return replace(config, left_to_device=frozenset())
    return with_gpu_defaults(config, torch.cuda.get_device_properties(device).total_memory)


def with_gpu_defaults(config: WorkerConfig, gpu_bytes: int) -> WorkerConfig:
    """Give them their values on a GPU with so much memory, of which the worker has its part."""
    own_bytes = gpu_bytes * config.gpu_part
    defaults: dict[str, Any] = {
        "kv_memory": MemoryShare.auto(),
        "max_running": _MAX_RUNNING,
        "chunk_tokens": next(tokens for least, tokens in _CHUNKS if own_bytes >= least),
    }
    left = {name: defaults[name] for name in sorted(config.left_to_device)}
    logger.info("defaults on this GPU: %s", ", ".join(f"{key} {left[key]}" for key in left))
    return replace(config, **left, left_to_device=frozenset())
