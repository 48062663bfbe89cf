"""Prompts sent to a worker that its latest load report may not count yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class SentPrompt:
    """The input of an attempt that is on the worker."""

    room_tokens: int
    """Tokens of room that the worker counts as waiting for the prompt."""
    work_tokens: int
    """Prompt tokens that the worker computes before a later ordinary prompt; may be 0."""
    number: int = 0
    """The number of loads that had come before it was sent."""
    started: bool = False
    """Whether the worker has sent a token of it, or its end: it waits no longer."""


@dataclass(slots=True)
class _Tokens:
    """Sums of sent prompts' tokens: since the last load, and of all that wait."""

    sent: int = 0
    """Tokens sent since the last load, which may count them or not."""
    begun: int = 0
    """Tokens begun since the last load, whenever they were sent."""
    waiting: int = 0
    """Tokens sent at any time, and not begun."""

    def send(self, tokens: int) -> None:
        self.sent += tokens
        self.waiting += tokens

    def begin(self, tokens: int) -> None:
        self.begun += tokens
        self.waiting -= tokens

    def end(self, tokens: int, *, since_load: bool, started: bool) -> None:
        if not started:
            self.waiting -= tokens
        if since_load:
            self.sent -= tokens
            self.begun -= tokens * started

    def take_load(self) -> None:
        self.sent = self.begun = 0

    def pending(self, reported: int) -> int:
        return max(reported + self.sent, self.waiting)

    def backlog(self, reported: int) -> int:
        return max(reported + self.sent - self.begun, self.waiting)


class SentPrompts:
    """A correction of a worker's reported load by the prompts sent and begun since.

    A load may have been on its way while a prompt was sent. So at least all prompts that were sent
    and have not begun count as waiting. A prompt that was sent and ended since the last load counts
    for nothing: the load is then unchanged, and the worker need not report it.
    """

    def __init__(self) -> None:
        self._room, self._work = _Tokens(), _Tokens()
        self._prompts: list[int] = []
        self._num_loads = 0

    @property
    def since_load(self) -> Sequence[int]:
        """Tokens of each prompt sent since the last load, computed before an ordinary one."""
        return self._prompts

    def send(self, prompt: SentPrompt) -> None:
        """Count a prompt that is sent now."""
        prompt.number = self._num_loads
        self._room.send(prompt.room_tokens)
        self._work.send(prompt.work_tokens)
        if prompt.work_tokens:
            self._prompts.append(prompt.work_tokens)

    def begin(self, prompt: SentPrompt) -> None:
        """Note that a prompt waits no longer."""
        prompt.started = True
        self._room.begin(prompt.room_tokens)
        self._work.begin(prompt.work_tokens)

    def end(self, prompt: SentPrompt) -> None:
        """Forget a prompt whose attempt is over."""
        new, started = prompt.number == self._num_loads, prompt.started
        self._room.end(prompt.room_tokens, since_load=new, started=started)
        self._work.end(prompt.work_tokens, since_load=new, started=started)
        if new and prompt.work_tokens:
            self._prompts.remove(prompt.work_tokens)

    def take_load(self) -> None:
        """Note that the worker has reported its load."""
        self._num_loads += 1
        self._prompts = []
        self._room.take_load()
        self._work.take_load()

    def pending_room(self, reported: int) -> int:
        """Tokens that wait for room, or have begun since the load, which counts `reported`."""
        return self._room.pending(reported)

    def waiting_room(self, reported: int) -> int:
        """Tokens that wait for room, `reported` of which the load counts."""
        return self._room.backlog(reported)

    def waiting_work(self, reported: int) -> int:
        """Tokens to be computed before an ordinary prompt; the load counts `reported`."""
        return self._work.backlog(reported)
