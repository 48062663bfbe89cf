"""What a worker tells a router of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvrelay.engine.outbox import MessageStream
from kvrelay.engine.stop import Finish
from kvrelay.kv_transfer.attestation import Attestation
from kvrelay.mem_cache.ledger import PoolCounts
from kvrelay.model_runner.sampler import SampledToken


class RequestKey(NamedTuple):
    """Names one attempt at one request, on every worker that takes part in it."""

    router: str
    request_id: str
    attempt: int
    choice: int = 0
    """Of several outputs that one submission asks for; the first one's names them all."""

    def __str__(self) -> str:
        choice = f"/{self.choice}" if self.choice else ""
        return f"{self.request_id}#{self.attempt}{choice}"

    def of_choice(self, choice: int) -> RequestKey:
        """The same attempt's other output."""
        return self._replace(choice=choice)


class EndReason(StrEnum):
    """Why a worker says nothing more of a request."""

    FINISHED = "finished"
    """It stopped by itself; `End.finish` says how."""
    HANDED_OVER = "handed_over"
    """Prefill side: the decode side goes on."""
    ABORTED = "aborted"
    """It was cancelled."""
    FAILED = "failed"
    """`End.error` says why."""
    RETRACTED = "retracted"
    """It made room for others, or the worker drains: to be submitted again, with what was
    emitted."""


class Cause(StrEnum):
    """What a failed request, that another attempt could complete, has failed of."""

    PEER_LOST = "peer_lost"
    """The hand-over's stream broke: the other worker has left, or is gone."""
    PEER_FAILED = "peer_failed"
    """The prefill worker gave the request up."""
    READ_FAILED = "read_failed"
    """A read of its pages did not end well."""
    PAGE_MISMATCH = "page_mismatch"
    """Other bytes were read than were computed."""
    TRANSFER_REFUSED = "transfer_refused"
    """The transport between the two is too slow, or does not work."""
    PROTOCOL_ERROR = "protocol_error"
    """A hand-over message came where it may not."""


@dataclass(frozen=True, slots=True)
class End:
    """A request's end on this worker."""

    reason: EndReason
    finish: Finish | None = None
    error: str = ""
    cause: Cause | None = None
    """Of a failure; if there is one, another attempt could complete the request."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in each phase, as far as this worker knows them."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode: float = 0.0


NO_TIMINGS = Timings()


@dataclass(slots=True)  # not frozen: that would cost a microsecond more, for each token
class Output:
    """Tokens of one request from one step; `index` is the first one's place in the output."""

    key: RequestKey
    index: int
    tokens: tuple[SampledToken, ...] = ()
    end: End | None = None
    timings: Timings = NO_TIMINGS
    cached_tokens: int = 0
    """Prompt tokens that were not computed: found in the prefill side's prefix index."""
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Of the prompt's tokens but the first."""


@dataclass(frozen=True, slots=True)
class Load:
    """What placement reads, and operators."""

    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    """Prompt tokens not yet computed, or not yet pulled."""
    pools: tuple[PoolCounts, ...]
    growth_tokens: int = 0
    """That running requests are expected to add."""
    step_seconds: float = 0.0
    """Of the last forwards, a moving mean."""
    draining: bool = False
    """No more requests are taken."""
    peers: tuple[Attestation, ...] = ()
    """Workers that it reads from, and how fast."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One pass of the engine, as one router sees it."""

    outputs: tuple[Output, ...]
    load: Load | None = None
    """Only when it has changed."""


class RouterLink(MessageStream[StepOutputs]):
    """A router's stream, which is its lease: when it ends, its requests end here."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.router = router
