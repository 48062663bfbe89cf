"""Work that a device runs after its launch: streams, events, and memory for copies.

The host launches work on a stream and goes on. Work of one stream runs in the order of its
launches; work of two streams in any order, except for `wait_for`. An event passes when the work
before it has run. Until then no other code may use the memory that the work reads or writes.

On a CPU work runs while it is launched, and every event has passed. `cuda_streams` has a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

ArrayT = TypeVar("ArrayT", bound=np.generic)

_ALIGNMENT: Final = 64
LARGE_BYTES: Final = 1 << 20
"""The least bytes that staging allocates at a time."""
KEPT_USES: Final = 1024
"""The number of uses for which a set keeps memory that none of them needs."""
STEPS_IN_FLIGHT: Final = 2
"""The most steps that are launched and whose results are not on the host; as many staging sets."""


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def passed(self) -> bool:
        """Whether all work before it has run. Once it has passed it stays passed."""
        ...

    def wait(self) -> None:
        """Block until it has passed. Raises the device's error if work has failed."""
        ...


class DeviceStream(Protocol):
    """A queue of work on a device."""

    def launch(self, work: Callable[[], object]) -> None:
        """Run `work` after all that was launched here before. May return before it has run.

        Host memory that `work` reads must stay unchanged until an event behind it passes. Raises
        the exceptions of `work`, if it is called at once.
        """
        ...

    def record(self) -> DeviceEvent:
        """Record an event behind all that was launched here so far."""
        ...

    def wait_for(self, event: DeviceEvent) -> None:
        """Make all later launches here run only after `event`. Does not block the host."""
        ...


class Streams(Protocol):
    """An interface to a device's streams, as one worker uses them."""

    forward: DeviceStream
    """The stream of forwards, sampling and copies of pages within pools, in the order of steps."""
    results: DeviceStream
    """The stream of copies of a step's results to the host."""
    copies: DeviceStream
    """The stream of copies of pages between the device and a lower tier."""
    is_immediate: bool
    """Whether work has run when `launch` returns."""

    def enter_thread(self) -> None:
        """Prepare a thread; must be called first on each thread that uses the streams."""
        ...

    def make_staging(self) -> Staging:
        """Make host memory for the arrays and the results of steps."""
        ...


class StagingSet(Protocol):
    """An interface to host memory of one step in flight."""

    def put(self, array: npt.NDArray[ArrayT]) -> npt.NDArray[ArrayT]:
        """Copy `array` to where the device can read it until the set is used again."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a device's tensor to the host; called by work on a stream.

        The caller keeps the device's tensor until that work has run. Otherwise its memory may be
        given to work of other streams.

        Returns:
            The host's tensor, whose contents are there once that work has run.
        """
        ...

    def use_until(self, event: DeviceEvent) -> None:
        """Allow the next use once `event` has passed: nothing reads or writes it then."""
        ...


class Staging(Protocol):
    """An interface to the sets of staging, used in turn."""

    def begin(self) -> StagingSet:
        """Get the set for the next step. Waits until its last use has ended."""
        ...


class PassedEvent:
    """The `DeviceEvent` of work that has run."""

    def passed(self) -> bool:
        """See `DeviceEvent`."""
        return True

    def wait(self) -> None:
        """See `DeviceEvent`."""


PASSED: Final = PassedEvent()


class ImmediateStream:
    """The `DeviceStream` of a CPU: the launching thread does the work."""

    def launch(self, work: Callable[[], object]) -> None:
        """See `DeviceStream`."""
        work()

    def record(self) -> DeviceEvent:
        """See `DeviceStream`."""
        return PASSED

    def wait_for(self, event: DeviceEvent) -> None:
        """See `DeviceStream`."""


class ImmediateStreams:
    """The `Streams` of a CPU; its staging is the arrays and tensors themselves."""

    is_immediate = True

    def __init__(self) -> None:
        self.forward: DeviceStream = ImmediateStream()
        self.results: DeviceStream = self.forward
        self.copies: DeviceStream = self.forward

    def enter_thread(self) -> None:
        """See `Streams`."""

    def make_staging(self) -> Staging:
        """See `Streams`."""
        return NoStaging()


class NoStaging:
    """The staging, and its only set, of a device that accesses the host's memory itself."""

    def begin(self) -> StagingSet:
        """See `Staging`."""
        return self

    def put(self, array: npt.NDArray[ArrayT]) -> npt.NDArray[ArrayT]:
        """See `StagingSet`."""
        return array

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `StagingSet`."""
        return tensor

    def use_until(self, event: DeviceEvent) -> None:
        """See `StagingSet`."""


class PinnedSet:
    """A `StagingSet` in pinned memory: one block, of up to twice what its largest step needed.

    After `KEPT_USES` uses without one that needs half of it, it is replaced by a smaller one.
    Results that are larger than `LARGE_BYTES` have memory of their own. It is freed when nothing
    refers to them.

    Args:
        allocate: allocates pinned memory of a number of bytes, ``[bytes]`` uint8.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._blocks = [allocate(LARGE_BYTES)]
        """The blocks of this step. The last is used now; the others were too small."""
        self._used = 0
        self._taken = 0
        """The bytes of all blocks that the step has taken."""
        self._largest = 0
        """The most bytes that a step has taken, in the last `_uses`."""
        self._uses = 0
        self._last_use: DeviceEvent = PASSED

    def begin(self) -> None:
        """Use it for another step. Blocks until its last use has ended."""
        self._last_use.wait()
        self._uses += 1
        self._largest = max(self._largest, self._taken)
        if len(self._blocks) > 1:
            self._resize(self._taken)
        elif self._uses >= KEPT_USES:
            self._resize(self._largest)
        self._used = self._taken = 0

    def put(self, array: npt.NDArray[ArrayT]) -> npt.NDArray[ArrayT]:
        """See `StagingSet`."""
        staged: npt.NDArray[Any] = self._take(array.nbytes).numpy().view(array.dtype)
        staged = staged.reshape(array.shape)
        staged[...] = array
        return staged

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `StagingSet`."""
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        memory = self._take(nbytes) if nbytes <= LARGE_BYTES else self._allocate(nbytes)
        home = memory.view(tensor.dtype).view(tensor.shape)
        return home.copy_(tensor, non_blocking=True)

    def use_until(self, event: DeviceEvent) -> None:
        """See `StagingSet`."""
        self._last_use = event

    def _resize(self, needed: int) -> None:
        """Make one block for steps that need `needed` bytes, of at most twice as many."""
        size = max(LARGE_BYTES, _power_of_two(needed))
        if len(self._blocks) > 1 or size < len(self._blocks[0]):
            self._blocks = [self._allocate(size)]
        self._uses = self._largest = 0

    def _take(self, nbytes: int) -> torch.Tensor:
        """Take the next bytes of this step."""
        if self._used + nbytes > len(self._blocks[-1]):
            self._blocks.append(self._allocate(max(LARGE_BYTES, _power_of_two(nbytes))))
            self._used = 0
        taken = self._blocks[-1][self._used : self._used + nbytes]
        aligned = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._used += aligned
        self._taken += aligned
        return taken


def _power_of_two(nbytes: int) -> int:
    """Round up to a power of two, at least 1."""
    return 1 << max(0, nbytes - 1).bit_length()


class PinnedStaging:
    """The `Staging` of devices that copy while the host goes on.

    Args:
        allocate: allocates pinned memory of a number of bytes, ``[bytes]`` uint8.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._sets = [PinnedSet(allocate) for _ in range(STEPS_IN_FLIGHT)]
        self._next = 0

    def begin(self) -> StagingSet:
        """See `Staging`."""
        chosen = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        chosen.begin()
        return chosen


class Pinning(Protocol):
    """An interface that pins the host's memory for one device."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin memory for the device to access. Blocks; a GiB takes a while.

        Raises:
            RuntimeError: the device or the system does not pin so much. Nothing is pinned.
        """
        ...

    def unpin(self, address: int) -> None:
        """Unpin memory that was pinned from `address` on. No copy may use it any more.

        Raises:
            RuntimeError: the device's error.
        """
        ...
