"""Readers of a live request: what each is sent and when, slow ones, and their deadlines."""

from __future__ import annotations

import asyncio
import gc
import operator
import time
import tracemalloc

import pytest
from tokenizers import Tokenizer

from kvrelay.router.errors import AlreadyExists, DeadlineExceeded, SlowReader
from kvrelay.router.requests.events import ChoiceEnd, Completion, FinishReason
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.output import RequestOutput, SampledToken
from kvrelay.wire.submit import RequestKey

from .live_run import (
    DECODE,
    HANDED_OVER,
    LENGTH,
    MAX_UNREAD_BYTES,
    PREFILL,
    Client,
    Run,
    scored,
)

BYTES_OF_AN_EVENT = 100
"""Beside its content; with the token's id in the output."""


async def test_every_reader_sees_all_from_the_first(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    client = Client()
    with run.live.reader() as early:
        reading = asyncio.create_task(early.pass_on(client.take))
        await asyncio.sleep(0)
        assert [delta.tokens for delta in client.deltas] == [(SampledToken(65),)]
        run.say(DECODE, 1, [66], LENGTH)
        late = await run.events()
        await reading
    assert pb.GenerateResponse.FromString(client.taken.pop()).HasField("complete")
    assert client.deltas == late[0]
    assert len(late[0]) == 2


async def test_output_that_all_have_read_is_kept_up_to_a_bound(tokenizer: Tokenizer) -> None:
    run, client, late = Run(tokenizer, prompt_logprobs=20), Client(), Client()
    most, scores, number = 0, scored(60), 0
    with run.live.reader() as reader:
        reading = asyncio.create_task(reader.pass_on(client.take))
        run.say(PREFILL, 0, [], prompt_logprobs=scores, prompt_index=1)  # 15,000 bytes
        run.say(PREFILL, 0, [65], HANDED_OVER)
        while run.stream.published_bytes < 3 * MAX_UNREAD_BYTES:
            await asyncio.sleep(0)
            run.say(DECODE, number := number + 1, [66])
            most = max(most, run.stream.kept_bytes)
        await asyncio.sleep(0)
        assert MAX_UNREAD_BYTES / 2 < most < MAX_UNREAD_BYTES + BYTES_OF_AN_EVENT
        assert len(client.taken) == run.stream.num_events == number + 2
        with run.live.reader() as joined, pytest.raises(AlreadyExists, match="no longer kept"):
            await joined.pass_on(late.take)
        kept = run.stream.kept_bytes
        run.stream.drop(run.stream._num_dropped - 1)  # the late one has not read so far
        assert run.stream.kept_bytes == kept
        run.say(DECODE, number + 1, [67], LENGTH)
        await reading
    assert not late.taken
    assert pb.GenerateResponse.FromString(client.taken[-1]).HasField("complete")


async def test_the_last_reader_to_leave_aborts(run: Run) -> None:
    with run.live.reader():
        with run.live.reader():
            pass
        assert run.live.outcome is None
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.choices == (ChoiceEnd(FinishReason.ABORT, None),)
    assert run.cancels == [[7], [7]]


async def test_what_was_said_before_a_reader_came_is_not_unread(tokenizer: Tokenizer) -> None:
    run, client = Run(tokenizer, prompt_logprobs=20), Client(busy=True)
    run.say(PREFILL, 0, [], prompt_logprobs=scored(60), prompt_index=1)  # 15,000 bytes
    async with asyncio.timeout(None) as timeout:
        with run.live.reader(timeout) as reader:
            run.say(PREFILL, 0, [65])
            assert reader.error is None
            reading = asyncio.create_task(reader.pass_on(client.take))
            await asyncio.sleep(0)
            assert [len(delta.prompt_logprobs) for delta in client.deltas] == [60]
            run.say(PREFILL, 0, [], prompt_logprobs=scored(90)[60:], prompt_index=61)
            assert reader.error is None
            reading.cancel()


async def test_an_event_is_written_when_it_comes_if_the_one_before_was(run: Run) -> None:
    client = Client(busy=True)
    with run.live.reader() as reader:
        reading = asyncio.create_task(reader.pass_on(client.take, sends_first=True))
        await asyncio.sleep(0)
        for index in range(3):
            run.live.on_token(DECODE, 7, 0, index, 65 + index)
        assert client.ids == [65]  # at once: nothing was awaited
        for ids in ([65, 66], [65, 66, 67]):
            client.is_ready.set()
            await asyncio.sleep(0.01)
            assert client.ids == ids
        reading.cancel()


async def test_a_write_that_fails_ends_its_own_call_alone(run: Run) -> None:
    async def fail(event: bytes) -> None:
        raise ConnectionError("gone")

    client = Client()
    with run.live.reader() as one, run.live.reader() as other:
        calls = [
            asyncio.create_task(call) for call in (one.pass_on(fail), other.pass_on(client.take))
        ]
        await asyncio.sleep(0)
        for index in range(2):
            run.live.on_token(DECODE, 7, 0, index, 65 + index)
        with pytest.raises(ConnectionError):
            await calls[0]
        assert client.ids == [65, 66]
        calls[1].cancel()


async def test_a_call_that_has_ended_is_written_nothing_more(run: Run) -> None:
    client = Client(busy=True)
    with run.live.reader() as reader, run.live.reader():
        for index in range(2):
            run.live.on_token(DECODE, 7, 0, index, 65 + index)
        reading = asyncio.create_task(reader.pass_on(client.take, sends_first=True))
        await asyncio.sleep(0)
        client.is_ready.set()  # in the same turn, so the write's end comes first
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0.01)
        run.live.on_token(DECODE, 7, 0, 2, 67)
        assert client.ids == [65]


async def test_a_slow_reader_is_not_aborted_but_fails(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, prompt_logprobs=20)

    async def read_slowly() -> None:
        async with asyncio.timeout(None) as timeout:
            with run.live.reader(timeout):
                run.say(PREFILL, 0, [], prompt_logprobs=scored(60), prompt_index=1)
                await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await read_slowly()
    assert isinstance(run.live.outcome, SlowReader)
    assert run.cancels == [[7], [7]]


async def test_a_shared_request_fails_at_the_last_of_its_deadlines(run: Run) -> None:
    now = time.monotonic()
    with run.live.reader(deadline=now + 60), run.live.reader() as one:
        with run.live.reader(deadline=now + 0.02):
            await asyncio.sleep(0.05)
            assert run.live.outcome is None
        assert run.live.outcome is None
        with run.live.reader(deadline=now), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await one.pass_on(Client().take)
    assert isinstance(run.live.outcome, Completion)  # aborted: the last had no deadline


async def test_a_request_fails_at_its_deadline(run: Run) -> None:
    deadline = time.monotonic() + 0.02
    with run.live.reader(deadline=deadline) as reader, pytest.raises(DeadlineExceeded):
        await reader.pass_on(Client().take)
    assert run.cancels == [[7], [7]]


async def test_what_is_kept_for_late_readers_is_as_large_as_what_they_are_sent(
    tokenizer: Tokenizer,
) -> None:
    """A tenth of what the deltas take as objects; a second reader costs nothing more."""
    run = Run(tokenizer, max_tokens=500, logprobs=20)
    outputs = [(token,) for token in scored(400)]
    gc.collect()
    tracemalloc.start()
    try:
        for index, tokens in enumerate(outputs):
            key = RequestKey("", "r", 7, 0)
            run.live.on_output(DECODE, RequestOutput(key, index, tokens))
        kept, _ = tracemalloc.get_traced_memory()
        assert run.stream.published_bytes > 400 * 20 * 5
        assert kept < run.stream.published_bytes + 400 * BYTES_OF_AN_EVENT
        run.live.abort()
        clients = Client(), Client()
        for client in clients:
            with run.live.reader() as reader:
                await reader.pass_on(client.take)
        assert all(map(operator.is_, *(client.taken for client in clients)))
    finally:
        tracemalloc.stop()
