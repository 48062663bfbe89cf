"""What an attempt needs of its workers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvrelay.router.generation import GenerationRequest
from kvrelay.router.known_prefixes import PromptMarks
from kvrelay.router.ranking import Candidate
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs of its workers, and what is held against some of them."""

    input_tokens: int
    """To be computed before the first output."""
    total_tokens: int
    """With all the output that there can be."""
    suspects: Set[str] = frozenset()
    """Incarnations that earlier attempts have failed with: chosen only if there is no other."""
    marks: PromptMarks = field(default_factory=dict)
    """Of the prompt: who has its prefixes is preferred to others that are about as loaded."""
    computed_by: str = ""
    """The one incarnation that may compute the prompt; empty: any may."""
    failed_by: WorkerRole | None = None
    """Whose computing the prompt has failed, perhaps: the other role is to compute it."""

    @classmethod
    def of(cls, request: GenerationRequest, emitted: int = 0) -> Demand:
        """Of an attempt at a request, by which an earlier one has emitted so many tokens."""
        input_tokens = len(request.input_ids) + emitted
        return cls(input_tokens, request.total_tokens, marks=request.marks)

    def tokens_of(self, role: WorkerRole) -> int:
        """Tokens that a worker of a role comes to hold for it."""
        return self.input_tokens if role is WorkerRole.PREFILL else self.total_tokens

    def may_be_computed_by(self, worker: Candidate) -> bool:
        """Whether the worker may compute the prompt."""
        return self.computed_by in ("", worker.incarnation)
