"""The prompts that are being computed, chunk by chunk: on a prefill or an aggregated worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrelay.engine.chunks import share_budget
from kvrelay.engine.core import EngineCore
from kvrelay.engine.outputs import Timings
from kvrelay.engine.request import Request
from kvrelay.engine.step import Computed, Scheduled
from kvrelay.engine.tape import Tape
from kvrelay.model_runner.sampler import SampledToken

RequestT = TypeVar("RequestT", bound=Request)


@dataclass(eq=False, slots=True)
class PromptRun:
    """What becomes of a request's input."""

    tape: Tape
    cached_tokens: int
    """Of the prompt that were found in the prefix index."""
    queued: float
    """Seconds until it had memory."""
    begun: float = field(default_factory=time.monotonic)
    scores: list[SampledToken] = field(default_factory=list)
    """Of the prompt's tokens but the first, if they were asked for."""

    def timings(self) -> Timings:
        """So far."""
        return Timings(queue=self.queued, prefill=time.monotonic() - self.begun)


class ComputingPrompts(Generic[RequestT]):
    """Requests that have memory for all of their input, and rows that they keep between chunks.

    Args:
        core: their memory.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._runs: dict[RequestT, PromptRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._runs)

    @property
    def tokens_left(self) -> int:
        """Of all inputs, those that no step was planned for yet."""
        return sum([_tokens_left(request) for request in self._runs])

    def reserve(self, request: RequestT, leaving: Sequence[int] | None = None) -> bool:
        """Let a request in: the promise of its input's pages, but for those that are cached.

        Args:
            request: waits, and has no memory.
            leaving: pages of each pool that are to be left for others.
        """
        # The last token is computed in any case, to be sampled from; and all are to be scored.
        known = 0 if request.prompt_logprobs is not None else request.input_len - 1
        if not self._core.reserve(request, known, leaving):
            return False
        request.settled_len = request.held.cache_protected_len
        tape = request.make_tape(request.choices)
        queued = time.monotonic() - request.received
        cached = min(request.settled_len, len(request.prompt_ids))
        self._runs[request] = PromptRun(tape, cached, queued)
        return True

    def leave(self, request: RequestT) -> PromptRun | None:
        """It is computed, or over; what there was of it."""
        return self._runs.pop(request, None)

    def schedule(self, budget: int) -> list[Scheduled]:
        """The next chunks, `budget` tokens together at most."""
        left = {request: _tokens_left(request) for request in self._runs}
        unplanned = {request: tokens for request, tokens in left.items() if tokens}
        return [
            self._next_chunk(request, tokens, last=tokens == unplanned[request])
            for request, tokens in share_budget(unplanned, budget)
        ]

    def _next_chunk(self, request: RequestT, tokens: int, *, last: bool) -> Scheduled:
        lease = request.held
        grown = self._core.ledger.grow(lease, lease.kv_committed_len + tokens)
        assert grown, "a promise was broken"
        return Scheduled(request, self._runs[request].tape, tokens, sample=last)

    def settled(self, request: RequestT, item: Scheduled, computed: Computed) -> None:
        """A chunk of one of them has ended."""
        request.settled_len += item.num_tokens
        self._runs[request].scores += computed.prompt_logprobs
        if not item.sample:
            self._core.ledger.slide(request.held, request.settled_len)


def _tokens_left(request: Request) -> int:
    return request.input_len - request.held.kv_committed_len
