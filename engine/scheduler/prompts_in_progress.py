"""The prompts that are being computed, chunk by chunk, on a worker of any role."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.request import Request
from kvrelay.pacing.chunk_size import NONE_WAIT, WaitingPrompts, count_backlog
from kvrelay.wire.output import PhaseTimings, SampledToken
from kvrelay.wire.sampling_limits import MAX_CHOICES
from kvrelay.wire.speeds import StepWork

RequestT = TypeVar("RequestT", bound=Request)


@dataclass(eq=False, slots=True)
class PromptRun:
    """The computation of one request's input."""

    token_state: TokenState
    cached_tokens: int
    """Prompt tokens that the prefix index, or its session, had."""
    num_tokens: int
    """Tokens to compute in all."""
    queued: float
    """Seconds until it had memory."""
    begun: float = field(default_factory=time.monotonic)
    num_scored: int = 0
    """Tokens of the prompt whose log-probabilities were emitted."""

    def timings(self) -> PhaseTimings:
        """Measure the seconds of its phases until now."""
        return PhaseTimings(
            queue_seconds=self.queued, prefill_seconds=time.monotonic() - self.begun
        )


class ComputingPrompts(Generic[RequestT]):
    """The requests whose input is being computed. Each holds memory for all of it, and a row.

    Args:
        context: their memory.
        publish: give each chunk to the prefix index once its forward has ended well.
            Otherwise nothing is published before the request is released.
    """

    def __init__(self, context: SchedulerContext[RequestT], *, publish: bool = True) -> None:
        self._context = context
        self._publish = publish
        self._runs: dict[RequestT, PromptRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._runs)

    @property
    def tokens_left(self) -> dict[RequestT, int]:
        """Tokens of each input that are in no step yet."""
        return {request: _tokens_left(request) for request in self._runs}

    @property
    def backlog_tokens(self) -> int:
        """The backlog that chunks are sized by: inputs that are not yet entirely in steps."""
        unfinished = [
            (run.num_tokens, left) for one, run in self._runs.items() if (left := _tokens_left(one))
        ]
        longest = max([tokens for tokens, _ in unfinished], default=0)
        return count_backlog(longest, sum([left for _, left in unfinished]))

    @property
    def completes_one(self) -> bool:
        """Whether the last chunk of one of them is in a step that has not ended."""
        return any(not _tokens_left(request) for request in self._runs)

    @property
    def next_context(self) -> int:
        """The tokens before the next chunk of the input of which most is computed."""
        return max([r.held.kv_committed_len for r in self._runs if _tokens_left(r)], default=0)

    @property
    def waiting(self) -> WaitingPrompts:
        """The prompts whose clients wait for a first token.

        Left out are requests that have had it, on another attempt, and those of a low priority.
        """
        waiting = {
            request: StepWork.of_prompt(left, request.held.kv_committed_len)
            for request in self._runs
            if not request.output_ids and request.priority <= 0 and (left := _tokens_left(request))
        }
        if not waiting:
            return NONE_WAIT
        oldest = min(request.arrived for request in waiting)
        return WaitingPrompts(
            self._context.clock() - oldest,
            sum(work.prompt_tokens for work in waiting.values()),
            sum(work.prompt_pairs for work in waiting.values()),
        )

    def reserve_and_add(self, request: RequestT, headroom: Sequence[int] | None = None) -> bool:
        """Start to compute a request: open its lease, with a promise of pages for its input.

        Pages that the prefix index or its session has are shared, not computed. A turn that goes on
        with its session's pages publishes nothing, so that it can be rolled back.

        Args:
            request: has no memory.
            headroom: pages of each pool that must stay free for others.

        Returns:
            Whether the memory was there. If not, nothing has changed.
        """
        if not self._context.reserve(request, request.reusable_len, headroom):
            return False
        self.add(request)
        return True

    def add(self, request: RequestT) -> None:
        """Start to compute the part of a request's input that its lease has not committed."""
        request.enter(Phase.PREFILLING)
        request.kv_written_len = request.held.kv_committed_len
        request.check_lengths()
        token_state = request.make_token_state(request.choices)
        queued = time.monotonic() - request.received
        cached = min(request.kv_written_len, len(request.prompt_ids))
        left = _tokens_left(request)
        self._runs[request] = PromptRun(token_state, cached, left, queued)

    def remove(self, request: RequestT) -> PromptRun | None:
        """Stop computing a request; its memory stays. Returns None if it was not being computed."""
        return self._runs.pop(request, None)

    def schedule(self, budget: int, *, alone: bool = False) -> list[Scheduled[RequestT]]:
        """Allocate the pages of the next chunks, which have at most `budget` tokens in all.

        With `alone` only the first request that is computed alone gets any, else only the others.
        """
        left = {one: _tokens_left(one) for one in self._runs if one.alone is alone}
        unplanned = {request: tokens for request, tokens in left.items() if tokens}
        if alone and unplanned:
            first = min(unplanned, key=lambda request: request.turn)
            unplanned = {first: unplanned[first]}
        return [
            self._next_chunk(request, tokens, last=tokens == unplanned[request])
            for request, tokens in _without_many_choices(share_budget(unplanned, budget), unplanned)
        ]

    def _next_chunk(self, request: RequestT, tokens: int, *, last: bool) -> Scheduled[RequestT]:
        lease = request.held
        grown = self._context.kv_cache.grow(lease, lease.kv_committed_len + tokens)
        assert grown, "a promise was broken"
        return Scheduled(request, self._runs[request].token_state, tokens, sample=last)

    def process_step_output(self, item: Scheduled[RequestT], output: StepOutput) -> None:
        """Record that a chunk's KV is written, and emit the log-probabilities of its tokens.

        Publishes it, then frees what a window has passed.
        """
        request = item.request
        request.kv_written_len += item.num_tokens
        request.check_lengths()
        request.progressed_at = time.monotonic()
        if output.prompt_logprobs:
            self._emit_scores(request, output.prompt_logprobs)
        if self._publish and not request.borrowed_len:
            # Nothing that still runs reads earlier tokens than those that come next.
            written = request.input_ids[: request.kv_written_len]
            self._context.kv_cache.sharing.publish_settled(request.held, written)
        if not item.sample:
            self._context.kv_cache.slide(request.held, request.kv_written_len)

    def _emit_scores(self, request: RequestT, scores: Sequence[SampledToken]) -> None:
        """Emit log-probabilities chunk by chunk; a long prompt's would not fit in one message."""
        run = self._runs[request]
        self._context.emit(
            request,
            choice=request.choices[0],
            prompt_logprobs=scores,
            prompt_index=run.num_scored + 1,
        )
        run.num_scored += len(scores)


def _tokens_left(request: Request) -> int:
    return request.input_len - request.held.kv_committed_len


def _without_many_choices(
    shares: Sequence[tuple[RequestT, int]], left: Mapping[RequestT, int]
) -> Iterator[tuple[RequestT, int]]:
    """Leave the last token of some prompts for a later step, if their choices are too many.

    Each choice takes a row of logits, so a step has no more than `MAX_CHOICES` beyond one a prompt.
    """
    room = MAX_CHOICES
    for request, tokens in shares:
        more = len(request.choices) - 1 if tokens == left[request] else 0
        if more <= room:
            room -= more
            yield request, tokens
        elif tokens > 1:
            yield request, tokens - 1


def share_budget(left: Mapping[RequestT, int], budget: int) -> list[tuple[RequestT, int]]:
    """Divide a step's token budget among prompts.

    Half of it is for the prompt whose turn it is, so that it ends in bounded time. The other half
    is for prompts that have fewer tokens left to compute, the shortest first. So a long prompt does
    not starve short ones.

    What is left after them goes to the first prompt, and then to the others. Prompts of one length
    end one after the other, not all together.

    Args:
        left: for each prompt its tokens that are in no step yet, one or more.
        budget: tokens of the step, one or more.

    Returns:
        The prompts that get any tokens, with their tokens, in the order of their turns.
    """
    shares: dict[RequestT, int] = {}

    def assign(request: RequestT, most: int) -> None:
        nonlocal budget
        share = min(left[request] - shares.get(request, 0), most, budget)
        if share > 0:
            shares[request] = shares.get(request, 0) + share
            budget -= share

    in_turn: Sequence[RequestT] = sorted(left, key=lambda r: r.turn)
    for request in in_turn[:1]:
        assign(request, (budget + 1) // 2)
    others = sorted(in_turn[1:], key=lambda r: (r.priority, left[r], r.arrived))
    for request in others:
        if left[request] < left[in_turn[0]]:
            assign(request, budget)
    for request in (*in_turn[:1], *others):
        assign(request, budget)
    return [(request, shares[request]) for request in in_turn if request in shares]
