"""Streams, events and pinned memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from kvrelay.device.device_streams import (
    PASSED,
    DeviceEvent,
    DeviceStream,
    ImmediateStreams,
    NoStaging,
    PinnedStaging,
    Pinning,
    Staging,
    Streams,
)

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every CUDA context, those of other threads included."""


class CudaEvent:
    """An `DeviceEvent`. A host thread that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def passed(self) -> bool:
        """See `DeviceEvent`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `DeviceEvent`."""
        self.event.synchronize()


class CudaStream:
    """A `DeviceStream`. Launched work is called at once; the device runs what it queues later."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def launch(self, work: Callable[[], object]) -> None:
        """See `DeviceStream`."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> DeviceEvent:
        """See `DeviceStream`."""
        return CudaEvent(self._stream)

    def wait_for(self, event: DeviceEvent) -> None:
        """See `DeviceStream`."""
        if isinstance(event, CudaEvent):  # any other has passed
            self._stream.wait_event(event.event)


class CudaStreams:
    """The `Streams` of one CUDA device.

    Forwards run on the device's default stream, like everything that is loaded before the first
    one.
    """

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forward: DeviceStream = CudaStream(torch.cuda.default_stream(device))
        self.results: DeviceStream = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self.copies: DeviceStream = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make the device's context current on this thread."""
        use_device(self._device)

    def make_staging(self) -> Staging:
        """See `Streams`."""
        return make_staging(self._device)


class CudaPinning:
    """The `Pinning` of a CUDA device. No two registrations may share a page of 4 KiB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> None:
        """See `Pinning`.

        It does not use torch's pinned memory, which takes a power of two, and no huge pages.
        """
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            _check(int(cudart.cudaHostRegister(address, nbytes, _PORTABLE)))

    def unpin(self, address: int) -> None:
        """See `Pinning`."""
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            _check(int(cudart.cudaHostUnregister(address)))


def _check(result: int) -> None:
    """Raise `torch.cuda.CudaError`, a `RuntimeError` with CUDA's message, unless it is success."""
    if result:
        raise torch.cuda.CudaError(result)


def use_device(device: torch.device) -> None:
    """Make a GPU's context current on this thread, before it calls CUDA or NIXL.

    A new thread has none: kernels would run on another GPU, and UCX would leave out its CUDA
    transports.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # `set_device` alone leaves it to the next call


def record_event(device: torch.device) -> DeviceEvent:
    """Record an event behind the work launched on the current stream of a device."""
    if device.type != "cuda":
        return PASSED
    return CudaEvent(torch.cuda.current_stream(device))


def make_streams(device: torch.device) -> Streams:
    """Make the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else ImmediateStreams()


def make_staging(device: torch.device) -> Staging:
    """Make host memory that a device copies from and to; a CPU needs none."""
    if device.type != "cuda":
        return NoStaging()
    return PinnedStaging(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))


def make_pinning(device: torch.device) -> Pinning | None:
    """Make the object that pins the host's memory for a device; None: a CPU needs none."""
    return CudaPinning(device) if device.type == "cuda" else None
