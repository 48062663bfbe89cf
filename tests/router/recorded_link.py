"""A link that remembers the commands it is given instead of sending them."""

from __future__ import annotations

from typing import Any

from kvrelay.router.generation import Submission
from kvrelay.wire.worker_info import WorkerRole

from .scripted_worker import ScriptedWorker


class RecordedLink:
    """Where an attempt submits and cancels."""

    def __init__(self, role: WorkerRole) -> None:
        self.endpoint = ScriptedWorker(f"{role}-0", role).endpoint
        self.submits: list[int] = []
        self.cancels: list[int] = []
        self.asked_to_end: list[int] = []
        self.draining = False

    def submit(
        self, submission: Submission, listener: Any, prefill: Any = None, lent_tokens: int = 0
    ) -> None:
        assert (prefill is not None) == (self.endpoint.role is WorkerRole.DECODE)
        self.submits.append(submission.attempt)

    def cancel(self, request_id: str, attempt: int) -> None:
        if attempt not in self.cancels:  # the second one finds nothing
            self.cancels.append(attempt)

    def ask_to_end(self, request_id: str, attempt: int) -> None:
        self.asked_to_end.append(attempt)
