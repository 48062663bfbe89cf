"""A request after validation: every field concrete, nothing left to default."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from kvrelay.router.callers import Caller
from kvrelay.router.placement.known_prefixes import PromptMarks
from kvrelay.router.sessions import Turn
from kvrelay.wire.submit import GenerationParams, KeptSession, SubmitRequest
from kvrelay.wire.worker_info import WorkerAddress, WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output is kept to, once it was found to be possible."""

    key: bytes
    """Equal for equal ones alone: workers compile these once."""
    num_bytes: int
    """That it takes where it is compiled, before any token has come."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the workers are asked to do."""

    submission: SubmitRequest
    """What they are told of it, whatever the attempt; the prompt itself stays in `input_ids`."""
    fingerprint: bytes
    """Digest of the body as the client sent it (a drawn seed is not in it):
    equal ones are the same request, tried again."""
    input_ids: Sequence[int]
    """Packed, 4 bytes each: there may be many long prompts."""
    caller: Caller
    """Whose request it is."""
    marks: PromptMarks = field(default_factory=dict)
    """Of its prompt's prefixes: by them the router knows who has them."""
    turn: Turn | None = None
    """Of the session whose turn it is."""
    grammar: Grammar | None = None
    """Of its structured output."""

    @property
    def request_id(self) -> str:
        """The client's name of it, or the router's where the client gave none."""
        return self.submission.key.request_id

    @property
    def params(self) -> GenerationParams:
        """All that its client has chosen for its outputs."""
        return self.submission.sampling_params

    @property
    def priority(self) -> int:
        """Its rank: a lower one is scheduled earlier."""
        return self.submission.priority

    @property
    def id(self) -> tuple[str, str]:
        """Unique on a router among live requests: a request id belongs to its caller."""
        return (self.caller.name, self.request_id)

    @property
    def total_tokens(self) -> int:
        """Tokens that a decode worker must be able to hold for each choice.

        Not for all of them at once: where they do not fit together, some are
        retracted and go on later.
        """
        return len(self.input_ids) + self.params.stops.max_tokens


def in_full_on(
    prompt_logprobs: int | None, alone: Set[WorkerRole] = frozenset()
) -> Set[WorkerRole]:
    """The roles whose workers reuse nothing for a prompt, if they compute it.

    Args:
        prompt_logprobs: as a `Submission`'s: the whole prompt is to be scored for them.
        alone: as a `Submission`'s: what others computed may be why a forward has failed there.
    """
    return frozenset(WorkerRole) if prompt_logprobs is not None else alone


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt at some choices of a request, as its workers are told of it.

    ::

        input_ids   prompt | emitted
                    [0, num_prompt_tokens) | what an earlier attempt said
    """

    request: GenerationRequest
    message: SubmitRequest
    """What they are told; `to_worker` adds the input, and what depends on the worker."""
    emitted: tuple[int, ...] = ()
    alone: Set[WorkerRole] = frozenset()
    """On workers of these roles a forward with one of the choices has failed, or may have: they
    are to have forwards of their own there."""

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
        """The same, with its span as W3C writes it."""
        message = dataclasses.replace(self.message, traceparent=traceparent)
        return dataclasses.replace(self, message=message)

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    @property
    def attempt(self) -> int:
        """The attempt's number."""
        return self.message.key.attempt

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that it is to yield."""
        return self.message.choices

    @property
    def input_len(self) -> int:
        """Tokens that are to be computed before the next one."""
        return len(self.request.input_ids) + len(self.emitted)

    @property
    def in_full_on(self) -> Set[WorkerRole]:
        """The roles whose workers reuse nothing for its prompt, if they compute it."""
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
        """What its worker of this role is sent.

        Args:
            role: the worker's.
            prefill: only for a decode worker.
            cached_tokens: of the input, that the worker is expected to have.
        """
        return dataclasses.replace(
            self.message,
            input_ids=(*self.request.input_ids, *self.emitted),
            prefill=WorkerAddress(prefill.address, prefill.incarnation) if prefill else None,
            alone=role in self.alone,
            cached_tokens=cached_tokens,
            session=None if role is WorkerRole.PREFILL else self._kept_session,
        )
