"""The position of an output in its reasoning, read from its tokens alone.

Tags are found in the bytes of the tokens. So it does not matter whether a tag is one token or
several, and each process that sees the same tokens finds the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, Protocol, Self

from kvrelay.text.output_parsers.held_text import is_long

GAPS: Final = (b"\n", b"\n\n")
"""The tokens between the end of the reasoning and what follows it, two line breaks at most."""
_MOST_GAP: Final = 2
_AT_ONCE: Final = 256
"""The tokens of a known output that are searched at once: one by one takes ten times as long."""


class ReasoningTexts(Protocol):
    """The texts around an output's reasoning."""

    @property
    def begun(self) -> bool:
        """Whether the prompt has begun the reasoning."""

    @property
    def begins(self) -> Sequence[str]:
        """The texts that begin it, where the output begins with one; white space may be before."""

    @property
    def ends(self) -> Sequence[str]:
        """The texts that end it."""

    @property
    def ends_before(self) -> Sequence[str]:
        """The texts of tokens that end it, too, and belong to what follows."""


class ReasoningPhase(Enum):
    """A part of an output that may begin with reasoning."""

    UNDECIDED = auto()
    """Nothing came that tells whether there is reasoning."""
    INSIDE = auto()
    GAP = auto()
    """The reasoning has ended, and line breaks may come before what follows."""
    BEHIND = auto()


class ReasoningProgress:
    """The position of one output in its reasoning.

    ::

        tokens   reasoning, its tags | line breaks | what follows
                                                   | follows_at

    Args:
        marks: the texts around the reasoning.
        bytes_of: returns the bytes of a token, a special one's text included.
    """

    __slots__ = (
        *("_begins", "_bytes_of", "_ends", "_ends_before", "_gap_left", "_tail", "_undecided"),
        *("follows_at", "num_thought", "num_tokens", "phase"),
    )

    def __init__(self, marks: ReasoningTexts, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._begins = tuple(marks.begins)
        self._ends = tuple([end.encode() for end in marks.ends])
        self._ends_before = tuple([end.encode() for end in marks.ends_before])
        self._gap_left = _MOST_GAP
        self._tail = b""
        """The last bytes of the reasoning, in which an end may have begun."""
        self._undecided = b""
        self.num_tokens = 0
        """The tokens that were pushed."""
        self.num_thought = 0
        """The tokens of the reasoning so far, behind the text that has begun it."""
        self.follows_at: int | None = None
        """The index of the first token that follows; None: it is not known yet."""
        self.phase = ReasoningPhase.INSIDE if marks.begun else ReasoningPhase.UNDECIDED
        if not (marks.begun or marks.begins):
            self._follow_at(0)

    def copy(self) -> Self:
        """Copy it, to look ahead."""
        other = self.__class__.__new__(self.__class__)
        for name in self.__class__.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def follow(self, token_ids: Sequence[int]) -> None:
        """Push the next tokens."""
        for begin in range(0, len(token_ids), _AT_ONCE):
            some = token_ids[begin : begin + _AT_ONCE]
            if len(some) == 1 or not self._pass_on(some):
                for token_id in some:
                    self.push(token_id)

    def push(self, token_id: int) -> bool:
        """Push the next token; return whether it belongs to what follows the reasoning."""
        self.num_tokens += 1
        if self.phase is ReasoningPhase.BEHIND:  # as most tokens are
            return True
        data = self._bytes_of(token_id)
        match self.phase:
            case ReasoningPhase.UNDECIDED:
                self._decide(data)
            case ReasoningPhase.INSIDE:
                self.num_thought += 1
                self._think(data)
            case ReasoningPhase.GAP:
                if data in GAPS and len(data) <= self._gap_left:
                    self._shrink_gap(len(data))
                else:
                    self._follow_at(self.num_tokens - 1)
        return self.follows_at is not None and self.follows_at < self.num_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning is over, or there is none."""
        return self.phase in (ReasoningPhase.GAP, ReasoningPhase.BEHIND)

    @property
    def gap_left(self) -> int:
        """The most line breaks that may still come before what follows."""
        return self._gap_left if self.phase is ReasoningPhase.GAP else 0

    def unfinished_ends(self, most_bytes: int) -> frozenset[bytes]:
        """The rests of ends that the reasoning may have begun, of at most so many bytes."""
        tail = self._tail
        return frozenset(
            end[count:]
            for end in self._ends
            for count in range(max(1, len(end) - most_bytes), min(len(end) - 1, len(tail)) + 1)
            if tail.endswith(end[:count])
        )

    def _pass_on(self, token_ids: Sequence[int]) -> bool:
        """Push tokens at once, if none of them ends the reasoning; return whether it was done."""
        if self.phase is ReasoningPhase.INSIDE:
            pieces = list(map(self._bytes_of, token_ids))
            text = self._tail + b"".join(pieces)
            if any(end in text for end in self._ends):
                return False
            if any(one in pieces for one in self._ends_before):
                return False
            self._keep_tail(text)
            self.num_thought += len(token_ids)
        elif self.phase is not ReasoningPhase.BEHIND:
            return False
        self.num_tokens += len(token_ids)
        return True

    def _keep_tail(self, text: bytes) -> None:
        longest = max(map(len, self._ends), default=1)
        self._tail = text[max(0, len(text) - longest + 1) :]

    def _decide(self, data: bytes) -> None:
        self._undecided += data
        text = self._undecided.decode(errors="replace")
        begun = text.lstrip()
        waits = not is_long(len(text) - len(begun))
        opened = next((one for one in self._begins if begun.startswith(one)), None)
        if opened is not None and waits:
            self.phase = ReasoningPhase.INSIDE
            self._undecided = b""
            self._think(begun.removeprefix(opened).encode())
        elif not waits or not any(one.startswith(begun) for one in self._begins):
            self._follow_at(0)

    def _think(self, data: bytes) -> None:
        if data in self._ends_before:
            self._follow_at(self.num_tokens - 1)
            return
        text = self._tail + data
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not found:
            self._keep_tail(text)
            return
        at, end = min(found)
        rest = text[at + len(end) :]
        self.phase, self._tail = ReasoningPhase.GAP, b""
        self._shrink_gap(len(rest))

    def _shrink_gap(self, count: int) -> None:
        self._gap_left -= count
        if self._gap_left <= 0:
            self._follow_at(self.num_tokens)

    def _follow_at(self, index: int) -> None:
        self.phase, self.follows_at = ReasoningPhase.BEHIND, index
