"""A live request: reports of two workers go in, one ordered stream and one outcome come out."""

from __future__ import annotations

import asyncio
import gc
import itertools
import operator
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from kvrelay.router.attempt import AttemptFailed, AttemptRetracted
from kvrelay.router.choice import Choice
from kvrelay.router.client_messages import EventBytes
from kvrelay.router.errors import DeadlineExceeded, InternalFailure, RequestError, SlowReader
from kvrelay.router.events import ChoiceEnd, Completion, Delta, FinishReason
from kvrelay.router.failover import Failover, Retry
from kvrelay.router.fleet import Placement
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.limits import Limits
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.metrics import STALE_OUTPUTS, RouterMetrics
from kvrelay.router.output_stream import OutputStream
from kvrelay.router.readers import Patience, Readers
from kvrelay.router.seeds import Seeds
from kvrelay.router.text import TextStream
from kvrelay.router.validation import Validator
from kvrelay.router.worker_link import WorkerLink
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.codec import Codec
from kvrelay.wire.output import (
    EndReason,
    FailureReason,
    PhaseTimings,
    RequestEnd,
    RequestOutput,
    SampledToken,
    TokenLogprob,
)
from kvrelay.wire.request import RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import id_of

from .recorded_link import RecordedLink

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
DELTA = Codec(Delta, pb.GenerateDelta)
MAX_UNREAD_BYTES = 10_000
BYTES_OF_AN_EVENT = 100
"""Beside its content; with the token's id in the output."""
HANDED_OVER = RequestEnd(EndReason.HANDED_OVER)
LENGTH = RequestEnd(EndReason.LENGTH)
ABORTED = RequestEnd(EndReason.ABORTED)
RETRACTED = RequestEnd(EndReason.RETRACTED)
BROKEN = RequestEnd(EndReason.FAILED, error="pull", cause=FailureReason.FAILED)


class RecordedFailover:
    """Remembers which attempts ended early, and has no workers for a retry."""

    def __init__(self) -> None:
        self.retracted: list[int] = []
        self.failed: list[tuple[set[int], str]] = []

    def decide(self, verdict: AttemptRetracted | AttemptFailed, unfinished: Any) -> Retry:
        if isinstance(verdict, AttemptRetracted):
            self.retracted += sorted(verdict.choices)
        else:
            self.failed.append((set(verdict.choices), str(verdict.error)))
        return Retry("test", "", 60.0)

    def alone(self, choices: Any) -> bool:
        return False


class Client:
    """Takes events, one more each time it `is_ready`; always, unless it was made busy."""

    def __init__(self, *, busy: bool = False) -> None:
        self.is_ready = asyncio.Event()
        self.taken: list[bytes] = []
        self._busy = busy
        if not busy:
            self.is_ready.set()

    async def take(self, event: bytes) -> None:
        self.taken.append(event)
        await self.is_ready.wait()
        if self._busy:
            self.is_ready.clear()

    @property
    def deltas(self) -> list[Delta]:
        """All events, which are deltas."""
        return list(map(delta_of, self.taken))

    @property
    def ids(self) -> list[int]:
        """The tokens of them."""
        return [token.token_id for delta in self.deltas for token in delta.tokens]


class Run:
    """A live request on two recorded links, and what its outcome was when it ended."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.links = (RecordedLink(PREFILL), RecordedLink(DECODE))
        self.ended: list[LiveRequest] = []
        self.failover = RecordedFailover()
        self.metrics = RouterMetrics("m")
        request = made(**params)
        stops = request.params.stops.with_eos([400])
        choices = [
            Choice(index, TextStream(tokenizer, stop=stops.stop), stops)
            for index in range(request.params.n)
        ]
        stopwatch = self.metrics.stopwatch()
        self.stream = OutputStream(request, choices, stopwatch, EventBytes(request.request_id))
        self.live = LiveRequest(
            request,
            self.stream,
            Readers(self.stream, Patience(MAX_UNREAD_BYTES, seconds=60)),
            cast("Failover", self.failover),
            self.metrics,
            stopwatch,
            itertools.count(7),
            self.ended.append,
        )
        prefill, decode = self.links
        self.live.start(Placement(cast("WorkerLink", decode), cast("WorkerLink", prefill)))

    def lose(self, link: int) -> None:
        self.live.on_lost(7, self.links[link].endpoint, "socket closed")

    @property
    def stale_outputs(self) -> float | None:
        name = STALE_OUTPUTS.name
        return self.metrics.registry.get_sample_value(name, {"model": "m"})

    def say(
        self,
        role: WorkerRole,
        index: int,
        ids: Sequence[int],
        end: RequestEnd | None = None,
        timings: PhaseTimings | None = None,
        choice: int = 0,
        **fields: Any,
    ) -> None:
        tokens = tuple(SampledToken(token_id) for token_id in ids)
        key = RequestKey("", "r", 7, choice)
        timings = timings or PhaseTimings()
        self.live.on_output(role, RequestOutput(key, index, tokens, end, timings, **fields))

    async def events(self) -> tuple[list[Delta], Completion | RequestError]:
        client = Client()
        try:
            with self.live.reader() as reader:
                await reader.pass_on(client.take)
        except RequestError as error:
            return client.deltas, error
        assert pb.GenerateResponse.FromString(client.taken.pop()).HasField("complete")
        assert isinstance(self.live.outcome, Completion)
        return client.deltas, self.live.outcome

    @property
    def cancels(self) -> list[list[int]]:
        return [link.cancels for link in self.links]


def delta_of(raw: bytes) -> Delta:
    return DELTA.from_message(pb.GenerateResponse.FromString(raw).delta)


def made(**params: Any) -> GenerationRequest:
    validator = Validator("m", lambda text, most_tokens: [], 16, Seeds(b"key"))
    message = pb.GenerateRequest(request_id="r", sampling_params=pb.SamplingParams(**params))
    message.input_ids.ids.extend([1, 2, 3])
    return validator.validate(message, Limits(402, 512, 512, 512))


@pytest.fixture
def run(tokenizer: Tokenizer) -> Run:
    return Run(tokenizer, seed=5)


async def test_tokens_of_both_workers_in_order(run: Run) -> None:
    assert [link.submits for link in run.links] == [[7], [7]]
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue_seconds=1, prefill_seconds=2))
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [67], LENGTH, PhaseTimings(transfer_seconds=3, decode_seconds=4))
    deltas, completion = await run.events()
    assert [(d.index, [t.token_id for t in d.tokens]) for d in deltas] == [
        (0, [65]),
        (1, [66]),
        (2, [67]),
    ]
    timings = PhaseTimings(1, 2, 3, 4)
    end = ChoiceEnd(FinishReason.LENGTH, None)
    assert completion == Completion((end,), 3, 3, 0, timings, 5)
    assert run.ended == [run.live]


async def test_decode_overtakes_prefill(run: Run) -> None:
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [67], LENGTH)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], HANDED_OVER)
    deltas, completion = await run.events()
    assert [t.token_id for d in deltas for t in d.tokens] == [65, 66, 67]
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 3


async def test_an_end_without_tokens_waits_for_the_first_token(run: Run) -> None:
    run.say(DECODE, 1, [], LENGTH)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert isinstance(run.live.outcome, Completion)


async def test_prefill_completes_and_decode_is_cancelled_quietly(run: Run) -> None:
    run.say(PREFILL, 0, [65], RequestEnd(EndReason.STOP, matched_stop=65))
    assert run.cancels[1] == [7]
    run.say(DECODE, 0, [], ABORTED)
    deltas, completion = await run.events()
    assert isinstance(completion, Completion)
    assert completion.choices == (ChoiceEnd(FinishReason.STOP, 65),)
    assert [(len(d.tokens), d.text) for d in deltas] == [(1, "")]


async def test_decode_gives_up_because_prefill_completed(run: Run) -> None:
    run.say(DECODE, 0, [], ABORTED)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], LENGTH)
    assert isinstance(run.live.outcome, Completion)


@pytest.mark.parametrize("decode_first", [True, False])
async def test_decode_gives_up_what_was_handed_over(run: Run, decode_first: bool) -> None:
    ends: list[Any] = [(DECODE, 1, [], ABORTED), (PREFILL, 0, [65], HANDED_OVER)]
    for end in ends if decode_first else reversed(ends):
        run.say(*end)
    assert run.failover.failed == [({0}, "decode-0: aborted")]


@pytest.mark.parametrize("end", [BROKEN, ABORTED])
async def test_a_failure_on_prefill_ends_the_attempt_on_both(run: Run, end: RequestEnd) -> None:
    run.say(PREFILL, 0, [], end)
    assert run.failover.failed == [({0}, f"prefill-0: {end.error or 'aborted'}")]
    assert run.live.outcome is None
    assert run.cancels[1] == [7]


async def test_a_failure_for_good_ends_the_request(run: Run) -> None:
    run.say(PREFILL, 0, [], RequestEnd(EndReason.FAILED, error="shape"))
    assert isinstance(run.live.outcome, InternalFailure)
    assert str(run.live.outcome) == "prefill-0: shape"
    assert run.failover.failed == []
    assert run.cancels[1] == [7]


async def test_a_lost_worker_ends_the_attempt_once(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.lose(1)
    run.lose(0)
    assert run.failover.failed == [({0}, "worker decode-0 was lost: socket closed")]
    assert run.live.outcome is None
    assert run.cancels[0] == [7]
    run.say(DECODE, 1, [66])
    assert run.stale_outputs == 1
    assert list(run.stream.choices[0].emitted) == [65]


async def test_a_retraction_waits_for_prefills_word(run: Run) -> None:
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [], RETRACTED)
    assert run.failover.retracted == []
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert run.failover.retracted == [0]
    assert list(run.stream.choices[0].emitted) == [65, 66]


async def test_a_retracted_choice_leaves_the_others_in_the_attempt(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    for choice in range(3):
        run.say(PREFILL, 0, [65 + choice], HANDED_OVER, choice=choice)
    run.say(DECODE, 1, [], RETRACTED, choice=1)
    assert run.failover.retracted == [1]
    assert run.cancels == [[], []]
    run.say(DECODE, 1, [99], choice=1)
    assert run.stale_outputs == 1
    for choice in (0, 2):
        run.say(DECODE, 1, [70], LENGTH, choice=choice)
    assert run.live.outcome is None
    assert run.cancels == [[7], [7]]  # nothing is left of the attempt
    assert list(run.stream.choices[1].emitted) == [66]


async def test_a_failure_is_of_every_choice_that_has_not_ended(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    run.say(PREFILL, 0, [65], LENGTH, choice=1)
    run.say(DECODE, 0, [], BROKEN, choice=0)
    run.say(DECODE, 0, [], BROKEN, choice=2)
    assert run.failover.failed == [({0, 2}, "decode-0: pull")]


# What is left when an attempt is over before its choice's end.


async def test_what_waits_behind_a_gap_is_forgotten(run: Run) -> None:
    run.say(DECODE, 1, [66], LENGTH)
    run.stream.interrupt(0)
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert list(run.stream.choices[0].emitted) == [65]
    assert run.live.outcome is None


@pytest.mark.parametrize(
    ("params", "letters", "end"),
    [
        ({"max_tokens": 2}, "xy", ChoiceEnd(FinishReason.LENGTH, None)),
        ({"stop": ["yz"]}, "xyz", ChoiceEnd(FinishReason.STOP, "yz")),
    ],
)
async def test_complete_output_needs_no_other_attempt(
    tokenizer: Tokenizer, params: Any, letters: str, end: ChoiceEnd
) -> None:
    run = Run(tokenizer, **params)
    run.say(PREFILL, 0, [id_of(tokenizer, letter) for letter in letters], HANDED_OVER)
    assert run.live.outcome is None
    run.stream.interrupt(0)
    deltas, completion = await run.events()
    assert isinstance(completion, Completion)
    assert completion.choices == (end,)
    assert "".join(delta.text for delta in deltas) == ("x" if "stop" in params else "xy")


@pytest.mark.parametrize("min_tokens", [2, 3])
async def test_an_end_of_sequence_is_complete_from_min_tokens_on(
    tokenizer: Tokenizer, min_tokens: int
) -> None:
    run = Run(tokenizer, min_tokens=min_tokens)
    run.say(PREFILL, 0, [65, 400], HANDED_OVER)
    run.stream.interrupt(0)
    ended = run.stream.choices[0].ended
    assert ended == (ChoiceEnd(FinishReason.STOP, 400) if min_tokens == 2 else None)


async def test_timings_add_up_over_attempts(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue_seconds=1, prefill_seconds=2))
    run.say(DECODE, 1, [66], None, PhaseTimings(decode_seconds=3))
    run.stream.interrupt(0)
    run.say(PREFILL, 2, [67], None, PhaseTimings(queue_seconds=0.5, prefill_seconds=1))
    run.say(DECODE, 3, [68], LENGTH, PhaseTimings(transfer_seconds=4, decode_seconds=1))
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.timings == PhaseTimings(1.5, 3, 4, 4)


async def test_the_outcome_never_changes(run: Run) -> None:
    run.live.abort()
    outcome = run.live.outcome
    run.say(DECODE, 0, [65], LENGTH)
    run.lose(0)
    run.live.abort()
    assert run.live.outcome is outcome
    assert run.ended == [run.live]


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


async def test_the_last_reader_to_leave_aborts(run: Run) -> None:
    with run.live.reader():
        with run.live.reader():
            pass
        assert run.live.outcome is None
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.choices == (ChoiceEnd(FinishReason.ABORT, None),)
    assert run.cancels == [[7], [7]]


async def test_an_abort_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["AB"])
    run.say(PREFILL, 0, [id_of(tokenizer, "A")], HANDED_OVER)
    run.live.abort()
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["", "A"]
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 1


async def test_a_stop_string_is_cut_but_its_tokens_count(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["BC"])
    a, b, c = (id_of(tokenizer, letter) for letter in "ABC")
    run.say(PREFILL, 0, [a], HANDED_OVER)
    run.say(DECODE, 1, [b])
    run.say(DECODE, 2, [c], RequestEnd(EndReason.STOP, matched_stop="BC"))
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["A", "", ""]
    assert isinstance(completion, Completion)
    assert (completion.choices[0].matched_stop, completion.completion_tokens) == ("BC", 3)


async def test_a_matched_token_has_no_text(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop_token_ids=[66])
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.say(DECODE, 1, [66], RequestEnd(EndReason.STOP, matched_stop=66))
    deltas, completion = await run.events()
    assert "".join(delta.text for delta in deltas) == tokenizer.decode([65])
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 2


async def test_output_that_cannot_be_rendered_fails_its_request_alone(run: Run) -> None:
    run.say(PREFILL, 0, [-1], HANDED_OVER)
    assert isinstance(run.live.outcome, InternalFailure)


# Readers that are slow, and deadlines.


def scored(count: int) -> tuple[SampledToken, ...]:
    top = tuple(TokenLogprob(token, -0.5) for token in range(20))
    return tuple(SampledToken(token, -0.5, top) for token in range(count))


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


async def test_a_token_out_of_order_waits_for_those_before_it(run: Run) -> None:
    """And the end, which came before, for all of them."""
    run.live.on_token(DECODE, 7, 0, 2, 67)
    run.say(DECODE, 3, [68], LENGTH)
    run.live.on_token(DECODE, 7, 0, 1, 66)
    assert not run.live.output_ids[0]
    run.live.on_token(PREFILL, 7, 0, 0, 65)
    deltas, completion = await run.events()
    assert [(d.index, [t.token_id for t in d.tokens]) for d in deltas] == [(0, [65, 66, 67, 68])]
    assert isinstance(completion, Completion)
    assert completion.choices == (ChoiceEnd(FinishReason.LENGTH, None),)


async def test_a_token_of_an_attempt_that_is_over_is_stale(run: Run) -> None:
    run.live.on_token(DECODE, 7, 0, 0, 65)
    run.live.on_token(DECODE, 8, 0, 1, 66)
    run.lose(1)
    run.live.on_token(DECODE, 7, 0, 1, 66)
    assert list(run.live.output_ids[0]) == [65]
    assert run.stale_outputs == 2


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


async def test_log_probabilities_of_a_prompt_come_in_bounded_deltas(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, prompt_logprobs=20)
    run.say(PREFILL, 0, [], prompt_logprobs=scored(500), prompt_index=1)
    run.say(PREFILL, 0, [], prompt_logprobs=scored(3000), prompt_index=1)  # another attempt
    run.say(PREFILL, 0, [65], LENGTH)
    deltas, _ = await run.events()
    assert [len(delta.prompt_logprobs) for delta in deltas] == [500, 1024, 1024, 452, 0]
    assert [one for delta in deltas for one in delta.prompt_logprobs] == list(scored(3000))


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
