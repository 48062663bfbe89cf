"""The demands of an attempt on its workers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from kvrelay.router.generation import GenerationRequest, PromptMarks, in_full_on
from kvrelay.router.placement.ranking import Candidate
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class Demand:
    """The demands of an attempt on its workers, and the suspicions against some of them."""

    input_tokens: int
    """Tokens to be computed before the first output token."""
    total_tokens: int
    """Input tokens and the longest possible output."""
    suspects: Set[str] = frozenset()
    """Incarnations that earlier attempts have failed with: chosen only if there is no other."""
    marks: PromptMarks = field(default_factory=dict)
    """The prompt's marks; workers that have its prefixes are preferred at about equal load."""
    in_full_on: Set[WorkerRole] = frozenset()
    """The roles whose workers reuse no cached KV for the prompt, if they compute it."""
    computed_by: str = ""
    """The only incarnation that may compute the prompt; empty: any may."""
    failed_by: WorkerRole | None = None
    """The role that may have failed to compute the prompt: the other role is to compute it."""

    home: str = ""
    """The incarnation that may have the KV of the request's session; empty: none has."""
    kept_tokens: int = 0
    """Tokens of the input that `home` is expected to have."""
    priority: int = 0
    """The request's: a prompt with less than 0 waits for no other."""

    @classmethod
    def of(cls, request: GenerationRequest) -> Demand:
        """The demand of the first attempt at a request."""
        in_full = in_full_on(request.params.prompt_logprobs)
        return cls.of_retry(request, 0, in_full)

    @classmethod
    def of_retry(
        cls, request: GenerationRequest, emitted: int, in_full_on: Set[WorkerRole]
    ) -> Demand:
        """The demand of a retry after earlier attempts have emitted `emitted` tokens."""
        tokens = len(request.input_ids) + emitted
        turn, home, kept = request.turn, "", 0
        if turn is not None and turn.home:
            home, kept = turn.home, turn.kept_on(turn.home, request.input_ids)
        return cls(
            tokens,
            request.total_tokens,
            marks=request.marks,
            in_full_on=in_full_on,
            home=home if kept else "",
            kept_tokens=kept,
            priority=request.priority,
        )

    def kept_on(self, incarnation: str) -> int:
        """Tokens of the input that a worker is expected to have for the session."""
        return self.kept_tokens if self.home == incarnation else 0

    def tokens_of(self, role: WorkerRole) -> int:
        """Tokens that a worker of a role comes to hold for the attempt."""
        return self.input_tokens if role is WorkerRole.PREFILL else self.total_tokens

    def to_compute_on(self, role: WorkerRole) -> Demand:
        """The demand on a worker of this role that computes the prompt, with what it may reuse."""
        return replace(self, marks={}) if role in self.in_full_on and self.marks else self

    def trusts(self, worker: Candidate) -> bool:
        """Whether no earlier attempt has failed with the worker."""
        return worker.incarnation not in self.suspects

    def may_be_computed_by(self, worker: Candidate) -> bool:
        """Whether the worker may compute the prompt."""
        return self.computed_by in ("", worker.incarnation)

    def suspect_of(self, prefill: Candidate, decode: Candidate) -> WorkerRole | None:
        """The role of a pair that must not compute the prompt, after earlier failures."""
        if self.trusts(prefill) is not self.trusts(decode):
            return WorkerRole.DECODE if self.trusts(prefill) else WorkerRole.PREFILL
        return None if self.failed_by is WorkerRole.AGGREGATED else self.failed_by
