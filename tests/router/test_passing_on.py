"""A reader passes a stream's events on: clients' doors that send first and that wait first."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.requests.events import Delta, Event
from kvrelay.router.requests.output_choice import Choice
from kvrelay.router.requests.output_stream import OutputStream
from kvrelay.router.requests.output_text import TextStream
from kvrelay.router.requests.readers import Patience, Readers
from tests.pairwise import few, whole

from .live_run import made

DOORS = pytest.mark.parametrize("sends_first", [True, False], ids=["sends first", "waits first"])


class Door:
    """Sends events to a client as gRPC does, or waits for room before that, as uvicorn does."""

    def __init__(self, *, sends_first: bool) -> None:
        self.sent: list[bytes] = []
        self.has_room = asyncio.Event()
        self._sends_first = sends_first

    async def write(self, event: bytes) -> None:
        if self._sends_first:
            self.sent.append(event)
        await self.has_room.wait()
        if not self._sends_first:
            self.sent.append(event)


class Passing:
    """A stream of tokens from 0, and the one reader that passes them on."""

    def __init__(
        self, tokenizer: Tokenizer, timeout: asyncio.Timeout, *, sends_first: bool
    ) -> None:
        request = made(seed=5)
        choice = Choice(0, TextStream(tokenizer), request.params.stops)
        stopwatch = RouterMetrics("m").stopwatch()
        self.stream = OutputStream(request, [choice], stopwatch, form)
        self.readers = Readers(self.stream, Patience(10_000, seconds=60))
        self.reader = self.readers.attach(timeout, None)
        self.door = Door(sends_first=sends_first)
        self.task = asyncio.create_task(
            self.reader.pass_on(self.door.write, sends_first=sends_first)
        )

    def publish(self) -> None:
        index = self.stream.num_events
        assert self.stream.take_next(7, 0, index, index)
        self.readers.go_on()

    def end(self) -> None:
        self.stream.abort()
        self.readers.go_on()


def form(event: Event) -> bytes:
    return b"%d" % event.index if isinstance(event, Delta) else b"end"


async def turns() -> None:
    """Lets all that is due go on."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is freed meanwhile was in no cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@DOORS
async def test_an_event_is_sent_as_soon_as_there_is_room(
    tokenizer: Tokenizer, sends_first: bool
) -> None:
    """And not only when the next one comes."""
    async with asyncio.timeout(None) as timeout:
        passing = Passing(tokenizer, timeout, sends_first=sends_first)
        await turns()
        passing.publish()
        assert passing.door.sent == ([b"0"] if sends_first else [])
        passing.door.has_room.set()
        await turns()
        assert passing.door.sent == [b"0"]
        passing.end()
        await passing.task
        assert passing.door.sent == [b"0", b"end"]


@DOORS
@whole(first=["room", "cancellation"], num_events=[1, 2])
async def test_nothing_is_sent_after_a_cancellation(
    tokenizer: Tokenizer, sends_first: bool, first: str, num_events: int
) -> None:
    """Though there is room in the same turn."""
    async with asyncio.timeout(None) as timeout:
        passing = Passing(tokenizer, timeout, sends_first=sends_first)
        await turns()
        for _ in range(num_events):
            passing.publish()
        before = list(passing.door.sent)
        if first == "room":
            passing.door.has_room.set()
            passing.task.cancel()
        else:
            passing.task.cancel()
            passing.door.has_room.set()
        with pytest.raises(asyncio.CancelledError):
            await passing.task
        await turns()
        assert passing.door.sent == before


@few(4)
@DOORS
@whole(has_room=[True, False], cancelled=[True, False])
async def test_a_stream_is_freed_when_its_reader_has_left(
    tokenizer: Tokenizer, uncollected: None, sends_first: bool, has_room: bool, cancelled: bool
) -> None:
    """With all its events, at once: not when garbage is collected."""
    async with asyncio.timeout(None) as timeout:
        passing = Passing(tokenizer, timeout, sends_first=sends_first)
        stream = weakref.ref(passing.stream)
        await turns()
        passing.publish()
        if has_room:
            passing.door.has_room.set()
            await turns()
        if cancelled:
            passing.task.cancel()
        else:
            passing.door.has_room.set()
            passing.end()
        await asyncio.wait([passing.task])
        passing.readers.detach(passing.reader)
        del passing
        await turns()
        assert stream() is None
