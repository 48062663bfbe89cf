"""From the engine thread to the event loop: one wake-up a pass, whatever it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
MessageT = TypeVar("MessageT")


class Sink(Protocol[MessageT_contra]):
    """Where messages go; called on the event loop."""

    def deliver(self, message: MessageT_contra) -> None:
        """Take one message. Must not block."""
        ...


class MessageStream(Generic[MessageT]):
    """A sink that a gRPC stream reads from, until it is closed."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue()

    def deliver(self, message: MessageT) -> None:
        """See `Sink`."""
        self._queue.put_nowait(message)

    def close(self) -> None:
        """End the stream after what is already in it. On the event loop only."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[MessageT]:
        while (message := await self._queue.get()) is not None:
            yield message


class Outbox:
    """Collects a pass's messages and hands them to the event loop at once.

    `put` and `flush` belong to the engine thread.

    Args:
        call_soon: runs a function with its arguments on the event loop, soon.
    """

    def __init__(self, call_soon: Callable[..., object]) -> None:
        self._call_soon = call_soon
        self._pending: list[tuple[Sink[object], object]] = []

    def put(self, sink: Sink[MessageT], message: MessageT) -> None:
        """Send `message` to `sink` at the next flush, in order."""
        self._pending.append((sink, message))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Hand over what was put since the last flush."""
        if self._pending:
            batch, self._pending = self._pending, []
            self._call_soon(_deliver, batch)


def _deliver(batch: list[tuple[Sink[object], object]]) -> None:
    for sink, message in batch:
        sink.deliver(message)
