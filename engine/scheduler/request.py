"""A request on a worker, from its submission to its last output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kvrelay.engine.executor.token_state import TokenState
from kvrelay.engine.scheduler.attempt_trace import AttemptTrace
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.mem_cache.host.host_copies import Load
from kvrelay.mem_cache.host.storage_tier import Prefetch
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.wire.submit import KeptSession, RequestKey, SamplingParams, StopConditions


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One attempt at a request on this worker. Only the engine thread touches it.

    Its tokens, and the parts whose KV is here::

        0 .... kv_written_len ....... kv_committed_len ....... num_tokens
        |  written by forwards  |  being written by    |  known, not yet
        |  and reads that ended |  forwards in flight  |  computed
    """

    key: RequestKey
    link: RouterLink
    """The router's stream, which gets its outputs."""
    prompt_ids: Sequence[int]
    output_ids: list[int]
    """The tokens generated so far, including those that an earlier attempt has emitted."""
    input_len: int
    """The tokens that it came with: the prompt, and those that an earlier attempt has emitted."""
    choices: tuple[int, ...]
    """The outputs of the prompt that this submission wants."""
    sampling: SamplingParams
    stops: StopConditions
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report for each prompt token; None: report no prompt
    tokens."""
    speculate: bool = True
    """Whether drafts of its tokens may be verified."""
    priority: int = 0
    """The priority; lower runs earlier."""
    namespace: str = ""
    """The part of the prefix index in which its prefix is found and left."""
    expected_cached_len: int = 0
    """Input tokens that its router expects to be cached here; they count as no load, if
    reusable."""
    grammar: Future[Any] | None = None
    """The compiled grammar of its output, held as long as it lives, so that no forward waits for
    it."""
    session: KeptSession | None = None
    """The session that this is a turn of. Then it has one choice only."""
    borrowed_len: int = 0
    """Tokens that its lease had when its session lent it; 0: the lease is its own."""
    arrived: float = field(default_factory=time.monotonic)
    """The moment at which a router took it, by this worker's clock."""
    received: float = field(default_factory=time.monotonic)
    """The moment at which this attempt began here; earlier ones have timings of their own."""
    bypassed: int = 0
    """Later requests that were admitted while this one did not fit."""
    refused_at: int = -1
    """The `KVCacheManager.room_version` when it last did not fit; until that changes it cannot
    fit."""
    lease: Lease | None = None
    last_step: int = 0
    """The last forward that reads this request's page table."""
    kv_written_len: int = 0
    """Tokens whose KV is here for good: it may be announced, published, or slid past."""
    alone_until: int = 0
    """The number of output tokens up to which it is computed in forwards of its own, as it may
    break them."""
    progressed_at: float = field(default_factory=time.monotonic)
    """The moment when it was last granted something, or some of its input was last computed or
    read."""
    prefix_wait: PrefixWait | None = None
    """The wait for a leader, so that it need not compute or read what both share."""
    tier_keys: bytes = b""
    """The page hashes of its reusable input, computed when first needed."""
    storage_asked: bool = False
    """Whether storage was asked what it has of its input."""
    tier_looked_at: tuple[int, int] = (-1, -1)
    """The versions of cache and tier at which nothing was to be brought back for it."""
    tier_load: TierLoad | None = None
    """The load that brings pages back for it, or the last one that did."""
    loads_begun: int = 0
    """The number of loads that it has waited for, the current one included."""
    load_seconds: float = 0.0
    """Seconds that it has waited for loads before the last one."""
    storage_wait: StorageWait | None = None
    """The wait for pages that storage brings, or has brought, to the host."""
    trace: AttemptTrace | None = None
    """The trace of the request, if it is traced."""
    has_ended: bool = False
    """Whether it was released, though a forward may still compute it."""
    most_tokens: int = field(init=False)
    """Tokens whose KV it may come to hold: all but the last one sampled."""
    input_ids: TokenIds = field(init=False)
    """The ``[input_len]`` tokens that it came with, in the prefix index's form."""

    def __post_init__(self) -> None:
        self.input_ids = np.asarray(self.token_ids(0, self.input_len), np.int32)
        self.expected_cached_len = min(self.expected_cached_len, self.reusable_len)
        self.most_tokens = len(self.prompt_ids) + self.stops.max_tokens - 1

    @classmethod
    def of(cls, command: Submit, **more: Any) -> Self:
        """Make a request from a router's submission; `more` are the subclass's fields."""
        prompt = command.input_ids[: command.prompt_len]
        emitted = command.input_ids[command.prompt_len :]
        return cls(
            key=command.key,
            link=command.link,
            prompt_ids=prompt,
            output_ids=list(emitted),
            input_len=len(command.input_ids),
            choices=command.choices,
            sampling=command.sampling,
            stops=command.stops,
            # An earlier attempt has reported them before its first token.
            prompt_logprobs=None if emitted else command.prompt_logprobs,
            speculate=command.speculate,
            priority=command.priority,
            namespace=command.namespace,
            expected_cached_len=command.cached_tokens,
            grammar=command.grammar,
            session=command.session,
            arrived=command.arrived,
            trace=command.trace,
            **more,
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)

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
        computes_all = self.prompt_logprobs is not None or self.alone
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
            sampling=self.sampling,
            stops=self.stops,
            choices=choices,
            prompt_logprobs=self.prompt_logprobs,
            kv_len=self.kv_written_len,
            draft_kv_len=self.kv_written_len,
        )


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Pages that a request waits for, which come back from a lower tier."""

    load: Load
    since: float
    """The moment when the load was begun, by the cache's clock."""
    until: float
    """The moment, by the cache's clock, after which the request stops waiting."""


@dataclass(eq=False, slots=True)
class StorageWait:
    """Pages that come from storage to the host for a request."""

    prefetch: Prefetch
    num_pages: int
    """Whole pages of its input that may come."""
    since: float | None = None
    """The moment, by the cache's clock, from which it could have begun without them; None: not
    yet."""
    left_at: float | None = None
    """The moment when the request went on without them; None: it has not."""
    wakes_at: float | None = None
    """The moment when the loop looks again whether the request still waits."""

    @property
    def ends_at(self) -> float | None:
        """The moment when the request stopped waiting for them; None: it still waits."""
        return self.prefetch.ended_at if self.left_at is None else self.left_at

    def seconds(self, now: float) -> float:
        """Compute how long the request has waited for them by now, though it could have begun."""
        if self.since is None:
            return 0.0
        return max(0.0, (now if self.ends_at is None else self.ends_at) - self.since)


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """The wait of a request for a leader."""

    leader: Request
    """The request that computes, or reads, the shared prefix."""
    shared_len: int
    """Tokens of the shared whole pages; the wait ends when they are in the prefix index."""
    looked_at: int = -1
    """The `KVCacheManager.room_version` when the index was last found to lack some of them."""
