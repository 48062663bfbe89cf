"""The clients that read one request's stream: their positions, and how long each waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.router.errors import DeadlineExceeded, RequestError, SlowReader
from kvrelay.router.requests.inline_coroutine import MORE, InlineCoroutine
from kvrelay.router.requests.output_stream import OutputStream

Write = Callable[[bytes], Coroutine[Any, Any, None]]
"""A function that sends an event to a client; it is done when there is room for the next.

It may hand the event over before it awaits room (gRPC does) or after (uvicorn does): see
`Reader.pass_on`.
"""

MOST_READERS: Final = 8
"""The most clients that read one request: each costs as much as the first, a token."""
_DEADLINE_SLACK_SECONDS: Final = 0.25
"""The time before its deadline within which a client's departure counts as due to the deadline.

The client's clock ends the call, and the cancellation comes before this router's clock has got
there.
"""


@dataclass(frozen=True, slots=True)
class Patience:
    """The bounds on how long the router waits for clients that read slowly."""

    max_unread_bytes: int
    """The most unread bytes of a client's stream that came since it attached."""
    seconds: float
    """Seconds for a client to take one event."""


class Reader:
    """The position of one client in a request's events, from the first.

    It keeps no events of its own: unread ones are kept by the stream. An event counts as read when
    it was written.

    Args:
        stream: the request's output.
        patience: the bounds on a slow client.
        timeout: the call's, made to expire when the client is too slow; None: the call goes on.
        deadline: the call's, on the clock of `time.monotonic`; None: it has none.
    """

    def __init__(
        self,
        stream: OutputStream,
        patience: Patience,
        timeout: asyncio.Timeout | None,
        deadline: float | None,
    ) -> None:
        self.deadline = deadline
        self._stream = stream
        self._patience = patience
        self._timeout = timeout
        self._first_new = stream.num_events
        self._read_bytes = stream.published_bytes  # what came before it does not count
        self._number = 0  # of the event that is written, or is to be
        self._writing: InlineCoroutine | None = None  # None: it has not begun, or is over
        self._too_slow: SlowReader | None = None
        self._loop = asyncio.get_running_loop()
        self._patience_ends = math.inf  # on the loop's clock; infinity: it waits for no client
        self._timer: asyncio.TimerHandle | None = None

    async def pass_on(self, write: Write, *, sends_first: bool = False) -> None:
        """Write all events in order, each as soon as it is there and the one before is written.

        Raises the request's outcome if that is an error, and errors of a write. A write begins in
        the caller that brings the event, so it must need no task of its own.

        Args:
            write: writes an event to the client.
            sends_first: whether a write hands its event over before it awaits anything. The end of
                a write is then looked at only when the next event comes. It also goes on after a
                cancellation if its future is done. Otherwise a write goes on as soon as there is
                room, and never after a cancellation: it may still hold the event.
        """
        may_rest = self._is_idle if sends_first else None
        self._writing = InlineCoroutine(self._write_all(write), may_rest)
        try:
            await self._writing.end()
        finally:
            self._writing = None  # which holds this reader, and so all events

    async def _write_all(self, write: Write) -> None:
        stream = self._stream
        while self._writing is not None and not self._writing.is_over:
            while stream.is_coming(self._number):
                await MORE
            event = stream.event(self._number)
            if event is None:
                return
            self._begin_patience()
            await write(event)
            self._patience_ends = math.inf
            if self._number >= self._first_new:
                self._read_bytes += len(event)
            self._number += 1

    def _is_idle(self) -> bool:
        """Whether there is nothing to write after the event that is being written."""
        return self._stream.is_coming(self._number + 1)

    def go_on(self) -> None:
        """Begin to write the new events, or end the call if too many bytes wait already."""
        if self._writing is not None:
            self._writing.go_on()
        unread = self._stream.published_bytes - self._read_bytes
        if unread > self._patience.max_unread_bytes and self._too_slow is None:
            self._too_slow = SlowReader(
                f"{unread} bytes of its stream wait for the client, and the router keeps "
                f"{self._patience.max_unread_bytes} (--max-unread-bytes)"
            )
            self._end_call()

    @property
    def num_read(self) -> int:
        """The number of events that it needs no longer."""
        return self._number

    def close(self) -> None:
        """Detach from its call, which this reader no longer ends."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def error(self) -> RequestError | None:
        """Why its call ends before the stream does; None: the client left of its own accord."""
        if self._too_slow is None and self._timeout is not None and self._timeout.expired():
            self._too_slow = SlowReader(
                f"the client took nothing of its stream for {self._patience.seconds:g} s "
                "(--read-timeout)"
            )
        if self._too_slow is not None:
            return self._too_slow
        return DeadlineExceeded("while it was served") if is_due(self.deadline) else None

    def _begin_patience(self) -> None:
        self._patience_ends = self._loop.time() + self._patience.seconds
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_at(self._patience_ends, self._end_patience)

    def _end_patience(self) -> None:
        """End the call if the client's time is over, else look again later.

        A timer for each event would cost more than to read the event.
        """
        self._timer = None
        if self._writing is not None:
            self._writing.go_on()  # the write may have ended long ago
        if self._loop.time() >= self._patience_ends:
            self._end_call()
        elif self._patience_ends < math.inf and self._timer is None:
            self._timer = self._loop.call_at(self._patience_ends, self._end_patience)

    def _end_call(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())


def is_due(deadline: float | None) -> bool:
    """Whether a call that ends now ends because of its deadline."""
    return deadline is not None and time.monotonic() >= deadline - _DEADLINE_SLACK_SECONDS


class Readers:
    """All readers of one request.

    Args:
        stream: the request's output.
        patience: the bounds on each of them.
    """

    def __init__(self, stream: OutputStream, patience: Patience) -> None:
        self._stream = stream
        self._patience = patience
        self._readers: set[Reader] = set()

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def deadline(self) -> float | None:
        """The latest deadline of their calls; None: at least one has no deadline."""
        deadlines = [reader.deadline for reader in self._readers]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(known) if known and len(known) == len(deadlines) else None

    def attach(self, timeout: asyncio.Timeout | None, deadline: float | None) -> Reader:
        """Add a reader."""
        reader = Reader(self._stream, self._patience, timeout, deadline)
        self._readers.add(reader)
        return reader

    def detach(self, reader: Reader) -> None:
        """Remove a reader."""
        self._readers.discard(reader)
        reader.close()

    def go_on(self) -> None:
        """Begin to write the new events, or end the calls for which too many bytes wait already."""
        for reader in self._readers:
            reader.go_on()
        if self._readers and self._stream.kept_bytes > self._patience.max_unread_bytes:
            self._stream.drop(min(reader.num_read for reader in self._readers))
