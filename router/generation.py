"""A request after validation: every field concrete, no default left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from kvrelay.router.callers import Caller
from kvrelay.router.sessions import Turn
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.submit import GenerationParams, KeptSession, RequestKey, SubmitRequest
from kvrelay.wire.worker_info import WorkerAddress, WorkerInfo, WorkerRole

PromptMarks: TypeAlias = Mapping[PageHashes, tuple[int, ...]]
"""The marks of a prompt by hashing scheme: one scheme, if all workers have one page size.

They belong to one tenant and salt, and so match no other's.
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar that an output must follow, known to compile."""

    key: bytes
    """A key that only equal grammars share: workers compile them once."""
    num_bytes: int
    """The bytes that it takes where it is compiled, before any token has come."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request, from which its submissions to workers are made."""

    request_id: str
    fingerprint: bytes
    """The digest of the body as the client sent it, without a drawn seed.

    Requests with equal digests are the same one, tried again.
    """
    input_ids: Sequence[int]
    """Prompt token ids, packed in 4 bytes each: there may be many long prompts."""
    params: GenerationParams
    priority: int
    caller: Caller
    """The client that sent the request."""
    namespace: str
    """The part of the prefix index that the request uses."""
    marks: PromptMarks = field(default_factory=dict)
    """The marks of the prompt's prefixes, by which the router knows the workers that have them."""
    turn: Turn | None = None
    """The turn of a session that the request is; None: it is none."""
    grammar: Grammar | None = None
    """The grammar of its structured output."""

    @property
    def id(self) -> tuple[str, str]:
        """The id among the router's live requests: a request id is unique for its caller only."""
        return (self.caller.name, self.request_id)

    @property
    def total_tokens(self) -> int:
        """Tokens that a decode worker must be able to hold for each choice.

        The choices need not fit together: some are then retracted and go on later.
        """
        return len(self.input_ids) + self.params.stops.max_tokens


def in_full_on(
    prompt_logprobs: int | None, alone: Set[WorkerRole] = frozenset()
) -> Set[WorkerRole]:
    """The roles whose workers reuse no cached KV for a prompt, if they compute it.

    Args:
        prompt_logprobs: see `Submission`: they need the whole prompt to be scored.
        alone: see `Submission`: reused KV may be why a forward has failed there.
    """
    return frozenset(WorkerRole) if prompt_logprobs is not None else alone


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt at some choices of a request, as sent to its workers.

    ::

        input_ids   prompt | emitted
                    [0, num_prompt_tokens) | from earlier attempts
    """

    request: GenerationRequest
    attempt: int
    choices: range
    """A single choice, where something is emitted."""
    age_seconds: float
    """Seconds since the router took the request."""
    emitted: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    """The request's, unless they have come already."""
    alone: Set[WorkerRole] = frozenset()
    """The roles on whose workers a forward with one of the choices has failed, or may have.

    The choices are to have forwards of their own there.
    """
    traceparent: str = ""
    """The attempt's span, as W3C writes it; empty: the request is not traced."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt among the input ids."""
        return len(self.request.input_ids)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """All tokens to be computed before the next one."""
        return (*self.request.input_ids, *self.emitted)

    @property
    def in_full_on(self) -> Set[WorkerRole]:
        """The roles whose workers reuse no cached KV for its prompt, if they compute it."""
        return in_full_on(self.prompt_logprobs, self.alone)

    def kept_on(self, incarnation: str) -> int:
        """Tokens of its input that a worker is expected to have for its session."""
        turn = self.request.turn
        return 0 if turn is None else turn.kept_on(incarnation, self.request.input_ids)

    @property
    def _kept_session(self) -> KeptSession | None:
        turn = self.request.turn
        return None if turn is None else KeptSession(turn.name, turn.most_kept_tokens, turn.owner)

    def to_worker(
        self, role: WorkerRole, prefill: WorkerInfo | None, cached_tokens: int = 0
    ) -> SubmitRequest:
        """Make the message to its worker of this role.

        Args:
            role: the worker's.
            prefill: the prefill worker, only for a decode worker.
            cached_tokens: tokens of the input that the worker is expected to have.
        """
        return SubmitRequest(
            key=RequestKey("", self.request_id, self.attempt),
            input_ids=self.input_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_params=dataclasses.replace(
                self.request.params, n=len(self.choices), prompt_logprobs=self.prompt_logprobs
            ),
            first_choice=self.choices.start,
            priority=self.request.priority,
            age_seconds=self.age_seconds,
            prefill=WorkerAddress(prefill.address, prefill.incarnation) if prefill else None,
            namespace=self.request.namespace,
            alone=role in self.alone,
            cached_tokens=cached_tokens,
            session=None if role is WorkerRole.PREFILL else self._kept_session,
            traceparent=self.traceparent,
        )
