"""Streams, events and pinned memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.mem_cache.streams import (
    PASSED,
    Event,
    ImmediateStreams,
    PinnedStaging,
    Staging,
    Stream,
    Streams,
)


class CudaEvent:
    """An `Event`. A host that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def passed(self) -> bool:
        """See `Event`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Event`."""
        self.event.synchronize()


class CudaStream:
    """A `Stream`: launched work is called at once, and what it gives to the device runs later."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def launch(self, work: Callable[[], object]) -> None:
        """See `Stream`."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        """See `Stream`."""
        return CudaEvent(self._stream)

    def wait_for(self, event: Event) -> None:
        """See `Stream`."""
        if isinstance(event, CudaEvent):  # any other has passed
            self._stream.wait_event(event.event)


class CudaStreams:
    """The `Streams` of one CUDA device.

    Forwards run on the device's default stream, as all that is loaded before the first one does.
    """

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forward: Stream = CudaStream(torch.cuda.default_stream(device))
        self.results: Stream = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self.copies: Stream = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Make the device's context this thread's."""
        use_device(self._device)

    def make_staging(self) -> Staging:
        """See `Streams`."""
        return PinnedStaging(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))


def use_device(device: torch.device) -> None:
    """Make a GPU's context this thread's, before it calls CUDA or NIXL.

    A new thread has none: kernels would run on another GPU, and UCX leaves its CUDA transports out.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # `set_device` alone leaves it to the next call


def record_event(device: torch.device) -> Event:
    """The event behind what was launched on the current stream of a device."""
    if device.type != "cuda":
        return PASSED
    return CudaEvent(torch.cuda.current_stream(device))


def make_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else ImmediateStreams()
