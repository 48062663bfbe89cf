"""A request on a worker, from its submission to its last output."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from kvrelay.engine.executor.token_state import TokenState
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import AttemptTrace, PhaseSpan
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.observe.spans import Attributes
from kvrelay.wire.request_progress import RequestPhase
from kvrelay.wire.submit import GenerationParams, KeptSession, RequestKey


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One attempt at a request on this worker. Only the engine thread touches it.

    Its tokens, and the parts whose KV is here::

        0 .... kv_written_len ....... kv_committed_len ....... num_tokens
        |  written by forwards  |  being written by    |  known, not yet
        |  and reads that ended |  forwards in flight  |  computed

    So ``0 <= kv_written_len <= kv_committed_len <= num_tokens``: `check_lengths` asserts it. While
    it generates, `kv_committed_len` may be ahead of `num_tokens` by the tokens of steps in flight.
    """

    SPANS: ClassVar[Sequence[PhaseSpan]] = ()
    """The spans of its trace that phases begin and end."""
    SHOWN: ClassVar[Mapping[Phase, RequestPhase]] = {Phase.PREFILLING: RequestPhase.COMPUTING}
    """The phases that people who watch are told of; others leave what they see as it was."""

    command: Submit
    """The command that brought it: its submission, and the router's stream."""
    key: RequestKey
    prompt_ids: Sequence[int]
    output_ids: list[int]
    """The tokens generated so far, including those that an earlier attempt has emitted."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    """The faults that its phases may set off."""
    choices: tuple[int, ...]
    """The outputs of the prompt that it stands for."""
    borrowed_len: int = 0
    """Tokens that its lease had when its session lent it; 0: the lease is its own."""
    received: float = field(default_factory=time.monotonic)
    """The moment at which this attempt began here; earlier ones have timings of their own."""
    lease: Lease | None = None
    last_step: int = 0
    """The last forward that reads this request's page table."""
    kv_written_len: int = 0
    """Tokens whose KV is here for good: it may be announced, published, or slid past."""
    alone_until: int = 0
    """The number of output tokens up to which it is computed in forwards of its own, as it may
    break them."""
    progressed_at: float = field(default_factory=time.monotonic)
    """The moment when it last came to a phase, or some of its input was last computed or read."""
    shown_phase: RequestPhase = RequestPhase.QUEUED
    """The last phase that people who watch are told of."""
    has_ended: bool = False
    """Whether it was released, though a forward may still compute it."""
    params: GenerationParams = field(init=False)
    """The parameters that its client has chosen."""
    input_len: int = field(init=False)
    """The tokens that it came with: the prompt, and those that an earlier attempt has emitted."""
    expected_cached_len: int = field(init=False)
    """Input tokens that its router expects to be cached here; they count as no load, if
    reusable."""
    most_tokens: int = field(init=False)
    """Tokens whose KV it may come to hold: all but the last one sampled."""
    open_ended: bool = field(init=False)
    """Whether its client has set no limit, so that `most_tokens` says nothing of its length."""
    input_ids: TokenIds = field(init=False)
    """The ``[input_len]`` tokens that it came with, in the prefix index's form."""

    def __post_init__(self) -> None:
        submission = self.command.submission
        self.params = submission.sampling_params
        self.open_ended = submission.open_ended
        self.input_len = len(submission.input_ids)
        self.input_ids = np.asarray(submission.input_ids, np.int32)
        self.expected_cached_len = min(submission.cached_tokens, self.reusable_len)
        self.most_tokens = len(self.prompt_ids) + self.params.stops.max_tokens - 1

    @classmethod
    def of(cls, command: Submit, **more: Any) -> Self:
        """Make a request from a router's submission; `more` are the subclass's fields."""
        submission = command.submission
        return cls(
            command=command,
            key=command.key,
            prompt_ids=submission.prompt_ids,
            output_ids=list(submission.emitted_ids),
            choices=submission.choices,
            **more,
        )

    def enter(self, phase: Phase) -> None:
        """Note that it comes to a phase: its trace, those who watch and those who wait see it.

        It may not return: a fault may be due.
        """
        self.progressed_at = time.monotonic()
        self.shown_phase = self.SHOWN.get(phase, self.shown_phase)
        if self.trace is not None:
            self.trace.enter(phase, self.SPANS)
        self.faults.reach(phase, self.peer)

    def record(
        self,
        span: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> None:
        """Record a span between two moments, if it is traced."""
        if self.trace is not None:
            self.trace.record(span, began, ended, attributes, error=error)

    @property
    def peer(self) -> str:
        """The incarnation of the other worker that takes part in it; empty: none does."""
        return ""

    @property
    def link(self) -> RouterLink:
        """The router's stream, which gets its outputs."""
        return self.command.link

    @property
    def trace(self) -> AttemptTrace | None:
        """The trace of the request, if it is traced."""
        return self.command.trace

    @property
    def session(self) -> KeptSession | None:
        """The session that this is a turn of. Then it has one choice only."""
        return self.command.submission.session

    @property
    def namespace(self) -> str:
        """The part of the prefix index in which its prefix is found and left."""
        return self.command.submission.namespace

    @property
    def priority(self) -> int:
        """The priority; lower runs earlier."""
        return self.command.submission.priority

    @property
    def arrived(self) -> float:
        """The moment at which a router took it, by this worker's clock."""
        return self.command.arrived

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)

    def check_lengths(self) -> None:
        """Assert what is drawn above of a request with memory; cheap enough for every chunk."""
        written, committed, known = self.kv_written_len, self.held.kv_committed_len, self.num_tokens
        assert 0 <= written <= committed <= known, (
            f"{self.key}: {written} tokens written, {committed} committed, {known} known"
        )

    @property
    def alone(self) -> bool:
        """Whether its next tokens are computed in a forward of their own."""
        return len(self.output_ids) < self.alone_until

    @property
    def held(self) -> Lease:
        """The lease, which it must have."""
        assert self.lease is not None, f"{self.key} holds no memory"
        return self.lease

    @property
    def reusable_len(self) -> int:
        """The tokens of its input that need not be computed if the prefix index has them.

        The last token is always computed, to be sampled from. All tokens are computed if they are
        to be scored. So are they if a forward has failed with the request, because cached pages may
        be why.
        """
        computes_all = self.params.prompt_logprobs is not None or self.alone
        return 0 if computes_all else self.input_len - 1

    @property
    def turn(self) -> tuple[int, float]:
        """The sort key of the order in which requests are to run."""
        return (self.priority, self.arrived)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Get the tokens at the absolute positions ``[start, end)``."""
        prompt = len(self.prompt_ids)
        tokens = list(self.prompt_ids[start:end])
        if end > prompt:
            tokens += self.output_ids[max(start - prompt, 0) : end - prompt]
        return tokens

    def make_token_state(self, choices: Sequence[int]) -> TokenState:
        """Make the state for later forwards, which continue after the written KV."""
        return TokenState(
            token_ids=self.token_ids(0, self.num_tokens),
            prompt_ids=self.prompt_ids,
            input_len=self.input_len,
            params=self.params,
            choices=choices,
            kv_len=self.kv_written_len,
            draft_kv_len=self.kv_written_len,
        )
