"""The allocation of CUDA memory that is registered with NIXL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def outside_expandable_segments(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Make torch allocate in segments of a fixed size, even if its user wants expandable ones.

    NIXL registers expandable segments and then moves them at a hundredth of the speed.
    """
    told = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" not in told.replace(" ", "").lower():
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(told)
