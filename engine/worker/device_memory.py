"""The memory of a GPU: what is left for KV, measured before pools are allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.options.memory_share import MemoryShare


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


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
