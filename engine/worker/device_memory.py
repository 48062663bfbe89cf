"""How much of a GPU's memory is left for KV, measured before the pools are allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.options.memory_share import MemoryShare


class DeviceMemory(Protocol):
    """A device's memory, and what this process's allocator has of it, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody has, and all there is."""
        ...

    def reserved(self) -> int:
        """What the allocator has, whether or not it is in use."""
        ...

    def peak(self) -> int:
        """The most that `reserved` has been since `release_unused`."""
        ...

    def release_unused(self) -> None:
        """Give back what the allocator has and nobody uses."""
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
    """What a device's memory is needed for beside KV, in bytes."""

    total: int
    taken: int
    """By weights, workspaces, graphs, the CUDA context, and whoever else uses the device."""
    step: int
    """That the largest step takes for a while."""

    @classmethod
    def measure(cls, memory: DeviceMemory, largest_step: Callable[[], object]) -> MemoryUse:
        """Run the largest step to see what it takes. What it returns will be there beside it."""
        memory.release_unused()
        _kept = largest_step()
        peak = memory.peak()
        # What the step has left behind for the next ones, such as a library's workspace, is taken.
        memory.release_unused()
        free, total = memory.free_and_total()
        return cls(total, total - free, max(0, peak - memory.reserved()))

    def left_for_kv(self, share: MemoryShare, beside: float = 0.0, unmeasured: int = 0) -> int:
        """Bytes of KV, if the worker may take such a share of the device.

        Each of them needs `beside` more bytes of what is not measured. So many more are
        `unmeasured`, however much KV there is.

        Raises:
            ValueError: there is nothing left.
        """
        rest = int(share.part * self.total) - self.taken - self.step - unmeasured
        left = int(rest / (1 + beside))
        if left < 1:
            raise ValueError(
                f"kv_memory: nothing is left for KV of {share.part:.0%} of the device's "
                f"{_gib(self.total)}: {_gib(self.taken)} are taken, by weights for the most part, "
                f"the largest step needs {_gib(self.step)}, and transfers need {_gib(unmeasured)}"
            )
        return left


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
