"""A worker's reports of its requests, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvrelay.wire.load import PeerTransport, WorkerLoad
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.request_progress import WorkerProgress
from kvrelay.wire.submit import RequestKey


class TokenLogprob(NamedTuple):
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an output or a prompt, and the model's own log-probabilities if asked for."""

    token_id: int
    logprob: float | None = None
    """None if nobody asked for it."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens, likeliest first."""
    rank: int | None = None
    """The number of tokens that are at least as likely, itself included; of a prompt's alone."""


@dataclass(frozen=True, slots=True)
class PhaseTimings:
    """Seconds that a request spent in each phase; zero where the worker does not know."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer_seconds: float = 0.0
    decode_seconds: float = 0.0

    def merged(self, other: PhaseTimings) -> PhaseTimings:
        """The larger one of each phase.

        A sum would be wrong: a worker reports zero for phases of others, and may report its own
        more than once.
        """
        return PhaseTimings(
            max(self.queue_seconds, other.queue_seconds),
            max(self.prefill_seconds, other.prefill_seconds),
            max(self.transfer_seconds, other.transfer_seconds),
            max(self.decode_seconds, other.decode_seconds),
        )

    def plus(self, other: PhaseTimings) -> PhaseTimings:
        """The sum of each phase over an attempt and a later one."""
        return PhaseTimings(
            self.queue_seconds + other.queue_seconds,
            self.prefill_seconds + other.prefill_seconds,
            self.transfer_seconds + other.transfer_seconds,
            self.decode_seconds + other.decode_seconds,
        )


NO_TIMINGS = PhaseTimings()


class EndReason(StrEnum):
    """The reason why a worker reports nothing more of a choice."""

    STOP = "stop"
    """It is complete: end of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """It is complete: it has `max_tokens` tokens."""
    ABORTED = "aborted"
    """It was cancelled."""
    HANDED_OVER = "handed_over"
    """The prefill side is done, and the decode side goes on."""
    FAILED = "failed"
    """`RequestEnd.error` says why."""
    RETRACTED = "retracted"
    """The request made room for others, or the worker drains.

    It is to be submitted again, with the tokens that it has emitted.
    """


class FailureReason(StrEnum):
    """The reason why an attempt ended early although another one could complete the request."""

    WORKER_LOST = "worker_lost"
    """The router lost the worker. The router alone concludes this."""
    ABORTED = "aborted"
    """A worker gave the request up unasked. The router alone concludes this."""
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
    FORWARD_FAILED = "forward_failed"
    """A forward that computed it and others failed, or hung."""
    FORWARD_FAILED_ALONE = "forward_failed_alone"
    """A forward that computed it alone failed, or hung; or its own row of one did."""
    GRAMMAR_FAILED = "grammar_failed"
    """Its grammar cannot be followed any further. This cause alone is final."""
    FAILED = "failed"
    """The worker did not say why, or the reason is newer than this router."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a choice on one worker."""

    reason: EndReason
    matched_stop: int | str | None = None
    """The token id or the string that stopped it."""
    error: str = ""
    cause: FailureReason | None = None
    """The cause of a failure; after any but `GRAMMAR_FAILED`, another attempt could succeed."""

    @property
    def retryable(self) -> bool:
        """Whether another attempt could complete the request."""
        return self.cause not in (None, FailureReason.GRAMMAR_FAILED)


@dataclass(slots=True)  # not frozen: that would cost a microsecond more, for each token
class RequestOutput:
    """Tokens of one choice from one step, or its end, or both."""

    key: RequestKey
    """The choice; on the router that has received the output, its `router` is empty."""
    index: int
    """The first token's place in the output."""
    tokens: tuple[SampledToken, ...] = ()
    end: RequestEnd | None = None
    """The end, on this worker's last output of the choice."""
    timings: PhaseTimings = NO_TIMINGS
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefill side's prefix index, and not computed."""
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Log-probabilities of the prompt's tokens but the first.

    The worker that computes the prompt reports them chunk by chunk.
    """
    prompt_index: int = 0
    """The index in the prompt of the first of `prompt_logprobs`; 1 for the second token."""

    @property
    def is_next_token(self) -> bool:
        """Whether it has one token, and nothing else."""
        return (
            len(self.tokens) == 1
            and self.end is None
            and self.tokens[0].logprob is None
            and self.timings is NO_TIMINGS
            and not self.cached_tokens
            and not self.prompt_logprobs
        )


@dataclass(frozen=True, slots=True)
class NextTokens:
    """One token each of many choices, as lists of one length.

    Most of what a worker reports are such tokens, and lists cost a fraction of as many messages. A
    router's attempts are numbered over all of its requests.
    """

    attempts: tuple[int, ...]
    choices: tuple[int, ...]
    indexes: tuple[int, ...]
    token_ids: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield attempt, choice, index and token id of each token."""
        return zip(self.attempts, self.choices, self.indexes, self.token_ids, strict=True)


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """The outputs of one pass of a worker's engine, for one router."""

    outputs: tuple[RequestOutput, ...]
    load: WorkerLoad | None = None
    """The load if it has changed; on its way to a router, only if it has changed enough."""
    prefixes: PrefixUpdate | None = None
    """The change of the prefixes, if any; the first update has all that there are."""
    peers: tuple[PeerTransport, ...] = ()
    """On the way to a router: the peers that have changed since it was last told.

    The load's own `peers` are empty there.
    """
    gone_peers: tuple[str, ...] = ()
    """On the way to a router: incarnations that are no longer among the peers."""
    next_tokens: NextTokens | None = None
    """On the way to a router: the outputs that are one token each; they precede `outputs`."""
    ended_sessions: tuple[str, ...] = ()
    """The router's sessions whose KV the worker gave up on its own."""
    progress: WorkerProgress | None = None
    """The progress of requests, sent now and then while the router watches."""

    def packed(self) -> EngineOutputs:
        """A copy in which the outputs of one token each stand in `next_tokens`."""
        tokens: list[RequestOutput] = []
        rest: list[RequestOutput] = []
        for output in self.outputs:
            (tokens if output.is_next_token else rest).append(output)
        if not tokens:
            return self
        next_tokens = NextTokens(
            tuple([output.key.attempt for output in tokens]),
            tuple([output.key.choice for output in tokens]),
            tuple([output.index for output in tokens]),
            tuple([output.tokens[0].token_id for output in tokens]),
        )
        return replace(self, outputs=tuple(rest), next_tokens=next_tokens)
