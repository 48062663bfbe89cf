"""The messages from the engine thread to the event loop, sent with one wake-up a pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from kvrelay.wire.output import EngineOutputs

MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
MessageT = TypeVar("MessageT")


class Sink(Protocol[MessageT_contra]):
    """An interface that takes messages; called on the event loop."""

    def deliver(self, message: MessageT_contra) -> None:
        """Take one message. Must not block."""
        ...


class MessageStream(Generic[MessageT]):
    """A sink that a gRPC stream reads from, until it is closed."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue()

    def deliver(self, message: MessageT) -> None:
        """Add a message to the stream. On the event loop only."""
        self._queue.put_nowait(message)

    @property
    def is_empty(self) -> bool:
        """Whether neither a message nor the end waits to be read."""
        return self._queue.empty()

    @property
    def num_unread(self) -> int:
        """The number of messages that wait to be read; from any thread."""
        return self._queue.qsize()

    def take_all(self) -> list[MessageT | None]:
        """Take what waits to be read, without waiting; None stands for the end."""
        taken = []
        while not self._queue.empty():
            taken.append(self._queue.get_nowait())
        return taken

    def close(self) -> None:
        """End the stream after what is already in it. On the event loop only."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[MessageT]:
        while (message := await self._queue.get()) is not None:
            yield message


class Outbox:
    """The messages of a pass, handed to the event loop all at once.

    `put` and `flush` belong to the engine thread.

    Args:
        call_soon: runs a function with its arguments on the event loop, soon.
    """

    def __init__(self, call_soon: Callable[..., object]) -> None:
        self._call_soon = call_soon
        self._pending: list[tuple[Sink[object], object]] = []

    def put(self, sink: Sink[MessageT], message: MessageT) -> None:
        """Queue `message` for `sink` until the next flush; the order is kept."""
        self._pending.append((sink, message))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Hand over the messages that were put since the last flush."""
        if self._pending:
            batch, self._pending = self._pending, []
            self._call_soon(_deliver, batch)


def _deliver(batch: list[tuple[Sink[object], object]]) -> None:
    for sink, message in batch:
        sink.deliver(message)


class RouterLink(MessageStream[EngineOutputs]):
    """A router's stream, which is also its lease: when it ends, the router's requests here end."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.router = router
