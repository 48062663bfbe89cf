"""The memory of a GPU: what is left for KV, measured before pools are allocated, and defaults."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.model_runner.torch_options import parse_device
from kvrelay.options.memory_share import MemoryShare

logger = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
_MAX_RUNNING: Final = 256
"""The requests of a step of decode by which an H100 or H200 is about busy."""
_CHUNKS: Final = ((128 << 30, 8192), (64 << 30, 4096), (0, 2048))
"""The memory from which on a worker computes so many tokens of prompts in a step.

`--kv-memory auto` leaves room for the logits of two such steps. With a vocabulary of 128 k they
take 6 % of that memory at most.
"""


class DeviceMemory(Protocol):
    """An interface to a device's memory, and to this process's allocator, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes that are free, and the total."""
        ...

    def reserved(self) -> int:
        """Return the bytes that the allocator has, whether or not they are in use."""
        ...

    def peak(self) -> int:
        """Return the most that `reserved` has been since `release_unused`."""
        ...

    def release_unused(self) -> None:
        """Give back the memory that the allocator has and nothing uses."""
        ...


class CudaMemory:
    """The `DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See `DeviceMemory`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_reserved(self._device)

    def release_unused(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a device that is needed beside KV, in bytes."""

    total: int
    taken: int
    """The bytes of weights, workspaces, graphs, the CUDA context, and other users of the device.

    Of a worker that shares it: those that the worker has taken.
    """
    step: int
    """The bytes that the largest step takes temporarily."""
    others: int = 0
    """The bytes of the workers that share the device, if they are not in `taken`."""

    @classmethod
    def measure(
        cls, memory: DeviceMemory, largest_step: Callable[[], object], others: int = 0
    ) -> MemoryUse:
        """Run the largest step to measure it. Memory of its result counts as taken.

        `others` had been taken before this worker took any.
        """
        memory.release_unused()
        _kept = largest_step()
        peak = memory.peak()
        # What the step has left behind for the next ones, such as a library's workspace, is taken.
        memory.release_unused()
        free, total = memory.free_and_total()
        return cls(total, total - free - others, max(0, peak - memory.reserved()), others)

    def left_for_kv(self, share: MemoryShare, beside: float = 0.0, unmeasured: int = 0) -> int:
        """Compute the bytes left for KV, if the worker may take such a share of the device.

        Each byte of KV needs `beside` more bytes that are not measured. `unmeasured` more are
        needed, however much KV there is.

        Raises:
            ValueError: there is nothing left.
        """
        own = min(int(share.part * self.total), self.total - self.others)
        rest = own - self.taken - self.step - unmeasured
        left = int(rest / (1 + beside))
        if left < 1:
            raise ValueError(
                f"kv_memory: nothing is left for KV of {share.part:.0%} of the device's "
                f"{_gib(self.total)}: {_gib(self.taken)} are taken, by weights for the most part, "
                f"the largest step needs {_gib(self.step)}, and transfers need {_gib(unmeasured)}"
                + (f"; others have {_gib(self.others)}" if self.others else "")
            )
        return left


class GpuTurns:
    """The turns of the workers of one user that share a GPU, each in a process of its own.

    One takes memory after the other, so that each knows what it has taken itself. The kernel gives
    the turn on when a process ends, however it ends.

    Args:
        gpu: a name of the GPU that is the same for all of them.
        directory: one that all of them reach.
    """

    def __init__(self, gpu: str, directory: Path = _SHARED_MEMORY) -> None:
        self._path = directory / f"kvrelay-gpu-{os.geteuid()}-{gpu}"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it until the context ends. Blocks, for minutes perhaps."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waits until another worker has taken its memory of this GPU")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def on_its_device(config: WorkerConfig) -> WorkerConfig:
    """Give the options that were left to the device their values there. Blocks.

    Raises:
        UnsupportedOptionError: there is no such device.
    """
    device = parse_device(config.device)
    if device.type != "cuda" or not config.left_to_device:
        return replace(config, left_to_device=frozenset())
    return on_a_gpu(config, torch.cuda.get_device_properties(device).total_memory)


def on_a_gpu(config: WorkerConfig, gpu_bytes: int) -> WorkerConfig:
    """The same on a GPU with so much memory, of which the worker has its part."""
    own_bytes = gpu_bytes * config.gpu_part
    defaults: dict[str, Any] = {
        "kv_memory": MemoryShare.auto(),
        "max_running": _MAX_RUNNING,
        "chunk_tokens": next(tokens for least, tokens in _CHUNKS if own_bytes >= least),
    }
    left = {name: defaults[name] for name in sorted(config.left_to_device)}
    logger.info("defaults on this GPU: %s", ", ".join(f"{key} {left[key]}" for key in left))
    return replace(config, **left, left_to_device=frozenset())


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
