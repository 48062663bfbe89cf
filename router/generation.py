"""A request after validation: every field concrete, no default left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from kvrelay.router.callers import Caller
from kvrelay.router.sessions import Turn
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.submit import GenerationParams, KeptSession, SubmitRequest
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

    submission: SubmitRequest
    """The submission that all attempts begin with; the prompt itself stays in `input_ids`."""
    fingerprint: bytes
    """The digest of the body as the client sent it, without a drawn seed.

    Requests with equal digests are the same one, tried again.
    """
    input_ids: Sequence[int]
    """Prompt token ids, packed in 4 bytes each: there may be many long prompts."""
    caller: Caller
    """The client that sent the request."""
    marks: PromptMarks = field(default_factory=dict)
    """The marks of the prompt's prefixes, by which the router knows the workers that have them."""
    turn: Turn | None = None
    """The turn of a session that the request is; None: it is none."""
    grammar: Grammar | None = None
    """The grammar of its structured output."""
    call_ids: tuple[str, ...] = ()
    """Other ids by which its caller may abort it: those of the HTTP call that it is a part of."""

    @property
    def request_id(self) -> str:
        """The client's id of it, or the router's own."""
        return self.submission.key.request_id

    @property
    def params(self) -> GenerationParams:
        """The parameters that its client has chosen."""
        return self.submission.sampling_params

    @property
    def priority(self) -> int:
        """The priority; lower runs earlier."""
        return self.submission.priority

    @property
    def id(self) -> tuple[str, str]:
        """The id among the router's live requests: a request id is unique for its caller only."""
        return (self.caller.name, self.request_id)

    @property
    def total_tokens(self) -> int:
        """Tokens that a decode worker must be able to hold for each choice: all but the last.

        The choices need not fit together: some are then retracted and go on later.
        """
        return len(self.input_ids) + self.params.stops.max_tokens - 1


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
    message: SubmitRequest
    """The message to its workers; `to_worker` adds the input, and what depends on the worker."""
    emitted: tuple[int, ...] = ()
    alone: Set[WorkerRole] = frozenset()
    """The roles on whose workers a forward with one of the choices has failed, or may have.

    The choices are to have forwards of their own there.
    """

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        attempt: int,
        choices: range,
        age_seconds: float,
        *,
        emitted: tuple[int, ...] = (),
        prompt_logprobs: int | None = None,
        alone: Set[WorkerRole] = frozenset(),
    ) -> Submission:
        """Make the submission of an attempt at a request.

        Args:
            request: the request.
            attempt: the attempt's number.
            choices: the choices; one alone, where something is emitted.
            age_seconds: since the router took the request.
            emitted: what earlier attempts have said.
            prompt_logprobs: as the request's, unless they have come already.
            alone: roles whose workers are to compute it in forwards of their own.
        """
        params = dataclasses.replace(
            request.params, n=len(choices), prompt_logprobs=prompt_logprobs
        )
        message = dataclasses.replace(
            request.submission,
            key=request.submission.key._replace(attempt=attempt),
            sampling_params=params,
            first_choice=choices.start,
            age_seconds=age_seconds,
        )
        return cls(request, message, emitted, alone)

    def traced(self, traceparent: str) -> Submission:
        """Copy it with the attempt's span, as W3C writes it."""
        message = dataclasses.replace(self.message, traceparent=traceparent)
        return dataclasses.replace(self, message=message)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def attempt(self) -> int:
        """The attempt's number."""
        return self.message.key.attempt

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that are wanted; a single one, where something is emitted."""
        return self.message.choices

    @property
    def input_len(self) -> int:
        """The number of tokens to be computed before the next one."""
        return len(self.request.input_ids) + len(self.emitted)

    @property
    def in_full_on(self) -> Set[WorkerRole]:
        """The roles whose workers reuse no cached KV for its prompt, if they compute it."""
        return in_full_on(self.message.sampling_params.prompt_logprobs, self.alone)

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
        return dataclasses.replace(
            self.message,
            input_ids=(*self.request.input_ids, *self.emitted),
            prefill=WorkerAddress(prefill.address, prefill.incarnation) if prefill else None,
            alone=role in self.alone,
            cached_tokens=cached_tokens,
            session=None if role is WorkerRole.PREFILL else self._kept_session,
        )
