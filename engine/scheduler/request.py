"""A request on a worker, from its submission to its last output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kvrelay.engine.executor.token_state import TokenState
from kvrelay.engine.scheduler.attempt_trace import AttemptTrace
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.mem_cache.host.host_copies import Load
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.storage.storage_tier import Prefetch
from kvrelay.wire.submit import GenerationParams, KeptSession, RequestKey


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One attempt at a request on this worker. Only the engine thread touches it.

    Its tokens, and what of their KV is here::

        0 .... kv_written_len ....... kv_committed_len ....... num_tokens
        |  written by forwards  |  being written by    |  known, not yet
        |  and reads that ended |  forwards in flight  |  computed
    """

    command: Submit
    """What its router has asked for, and where its outputs go."""
    key: RequestKey
    prompt_ids: Sequence[int]
    output_ids: list[int]
    """Those included that an earlier attempt has emitted."""
    choices: tuple[int, ...]
    """The outputs of the one prompt that it stands for."""
    borrowed_len: int = 0
    """Tokens that its lease had when its session lent it; 0: the lease is its own."""
    received: float = field(default_factory=time.monotonic)
    """When this attempt began here; earlier ones have timings of their own."""
    bypassed: int = 0
    """Later requests that were admitted while this one did not fit."""
    refused_at: int = -1
    """`KVCacheManager.room_version` when it last did not fit: until that changes it cannot."""
    lease: Lease | None = None
    last_step: int = 0
    """The last forward that reads this request's page table."""
    kv_written_len: int = 0
    """Tokens whose KV is here for good: it may be announced, published, or slid past."""
    alone_until: int = 0
    """Output tokens until which it is computed in forwards of its own: it may break them."""
    progressed_at: float = field(default_factory=time.monotonic)
    """When it was last granted something, or some of its input was last computed or read."""
    prefix_wait: PrefixWait | None = None
    """For whom it waits, so that it need not compute or read what both share."""
    tier_keys: bytes = b""
    """The page hashes of its reusable input, once they were needed."""
    storage_asked: bool = False
    """Storage was asked what it has of it."""
    tier_looked_at: tuple[int, int] = (-1, -1)
    """Versions of the cache and of the tier when nothing was to be brought back for it."""
    tier_load: TierLoad | None = None
    """What is brought back for it, or was at last."""
    loads_begun: int = 0
    """That it has waited for, or does."""
    load_seconds: float = 0.0
    """That it has waited for those before the last one."""
    storage_wait: StorageWait | None = None
    """What storage has of it, which comes to the host, or has."""
    has_ended: bool = False
    """It was released, though a forward may still compute it."""
    params: GenerationParams = field(init=False)
    """All that its client has chosen for its outputs."""
    input_len: int = field(init=False)
    """Tokens that it came with: the prompt, and what an earlier attempt has emitted."""
    expected_cached_len: int = field(init=False)
    """Tokens of its input that its router expects to be here: no load, if reusable."""
    most_tokens: int = field(init=False)
    """Tokens whose KV it may come to hold: all but the last one sampled."""
    input_ids: TokenIds = field(init=False)
    """``[input_len]`` what it came with, as the prefix index takes it."""

    def __post_init__(self) -> None:
        submission = self.command.submission
        self.params = submission.sampling_params
        self.input_len = len(submission.input_ids)
        self.input_ids = np.asarray(submission.input_ids, np.int32)
        self.expected_cached_len = min(submission.cached_tokens, self.reusable_len)
        self.most_tokens = len(self.prompt_ids) + self.params.stops.max_tokens - 1

    @classmethod
    def of(cls, command: Submit, **more: Any) -> Self:
        """Make a request of what a router has submitted; `more` are the subclass's fields."""
        submission = command.submission
        return cls(
            command=command,
            key=command.key,
            prompt_ids=submission.prompt_ids,
            output_ids=list(submission.emitted_ids),
            choices=submission.choices,
            **more,
        )

    @property
    def link(self) -> RouterLink:
        """Where its outputs go."""
        return self.command.link

    @property
    def trace(self) -> AttemptTrace | None:
        """The recorder of its spans, if it is traced."""
        return self.command.trace

    @property
    def session(self) -> KeptSession | None:
        """The session whose turn it is; it is the first choice then, and the only one."""
        return self.command.submission.session

    @property
    def namespace(self) -> str:
        """The part of the prefix index in which its prefix is found and left."""
        return self.command.submission.namespace

    @property
    def priority(self) -> int:
        """Its rank: a lower one runs earlier."""
        return self.command.submission.priority

    @property
    def arrived(self) -> float:
        """When a router took it, by this worker's clock."""
        return self.command.arrived

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def alone(self) -> bool:
        """Whether its next tokens are computed in a forward of their own."""
        return len(self.output_ids) < self.alone_until

    @property
    def held(self) -> Lease:
        """Its lease. It must have one."""
        assert self.lease is not None, f"{self.key} holds no memory"
        return self.lease

    @property
    def reusable_len(self) -> int:
        """Tokens of its input that need not be computed if the prefix index has them.

        The last one is, to be sampled from; and all are, if they are to be scored, or if a
        forward has failed with the request: what others computed may be why.
        """
        computes_all = self.params.prompt_logprobs is not None or self.alone
        return 0 if computes_all else self.input_len - 1

    @property
    def turn(self) -> tuple[int, float]:
        """A key that sorts requests in the order in which they are to run."""
        return (self.priority, self.arrived)

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at the absolute positions ``[start, end)``."""
        prompt = len(self.prompt_ids)
        tokens = list(self.prompt_ids[start:end])
        if end > prompt:
            tokens += self.output_ids[max(start - prompt, 0) : end - prompt]
        return tokens

    def make_token_state(self, choices: Sequence[int]) -> TokenState:
        """Make the state for the forwards to come, which continue after the written KV."""
        return TokenState(
            token_ids=self.token_ids(0, self.num_tokens),
            prompt_ids=self.prompt_ids,
            input_len=self.input_len,
            params=self.params,
            choices=choices,
            kv_len=self.kv_written_len,
            draft_kv_len=self.kv_written_len,
        )


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Pages that a request waits for, which come back from a lower tier."""

    load: Load
    since: float
    """When it was begun, by the cache's clock."""
    until: float
    """The moment, by the cache's clock, after which it does not wait any more."""


@dataclass(eq=False, slots=True)
class StorageWait:
    """Pages that come from storage to the host for a request."""

    prefetch: Prefetch
    num_pages: int
    """Whole pages of its input that may come."""
    since: float | None = None
    """When, by the cache's clock, the request could have begun without them; None: not yet."""
    left_at: float | None = None
    """When the request went on without them; None: it has not."""
    wakes_at: float | None = None
    """When the loop looks again whether the request still waits."""

    @property
    def ends_at(self) -> float | None:
        """When the request waited no more for them; None: it still does."""
        return self.prefetch.ended_at if self.left_at is None else self.left_at

    def seconds(self, now: float) -> float:
        """That the request has waited for them by now, though it could have begun."""
        if self.since is None:
            return 0.0
        return max(0.0, (now if self.ends_at is None else self.ends_at) - self.since)


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """What a request waits for."""

    leader: Request
    """Computes, or reads, what both share."""
    shared_len: int
    """Tokens of whole pages; the wait ends when they are in the prefix index."""
    looked_at: int = -1
    """`KVCacheManager.room_version` when the index was last looked at: it had not all of them."""
