"""The hand-over of one request's KV, as two state machines without any I/O.

Each side takes the other's messages and returns its own; the workers carry
them. The stream between them is the lease: the prefill side keeps what it has
announced untouched exactly while the stream lives.

::

    prefill side                                decode side
    QUEUED     --- Ask ------------------------>  OPEN -> ASKED
    ASKED      <-- Grant -----------------------  GRANTED   (whole prompt reserved)
    GRANTED    --- Announce (pages of a chunk) >  GRANTED   (reads them)
    ANNOUNCED  --- Announce (.., first token) ->  ANNOUNCED (reads the rest)
               <-- Done ------------------------  READ      (every read ended well)
    RELEASED   --- Released(valid) ------------>  VALID     (may be activated)

Either side may leave at any point: the prefill side by `Ended`, the decode
side by closing the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from kvrelay.kv_transfer.errors import ProtocolError


class EndReason(StrEnum):
    """Why the prefill side will announce nothing more."""

    FINISHED = "finished"
    """The first token completed the request."""
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ask:
    """The request is next to run: reserve its whole prompt."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The whole prompt is reserved."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Pages that have settled; `first_page` is their place in the request's page table."""

    first_page: int
    page_ids: tuple[int, ...]
    first_token: int | None = None
    """Only on the last announcement."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every announced page was read."""


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to `Done`: whether the pages were held all along."""

    valid: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended on the prefill side."""

    reason: EndReason
    detail: str = ""


FromDecode = Grant | Done
FromPrefill = Ask | Announce | Released | Ended


class PrefillState(Enum):
    """The prefill side's view."""

    QUEUED = auto()
    """Not yet next to run."""
    ASKED = auto()
    """Waits for the decode side's memory."""
    GRANTED = auto()
    """May compute and announce."""
    ANNOUNCED = auto()
    """All is announced; the decode side reads."""
    RELEASED = auto()
    """The decode side needs nothing more from here."""
    ENDED = auto()
    """Left early."""


class DecodeState(Enum):
    """The decode side's view."""

    OPEN = auto()
    """Waits for the prefill side's turn."""
    ASKED = auto()
    """Is asked to reserve the prompt."""
    GRANTED = auto()
    """Reads what is announced."""
    ANNOUNCED = auto()
    """Everything is announced; reads are running."""
    READ = auto()
    """Every read ended well; waits for the verdict."""
    VALID = auto()
    """The pages are what they should be."""


class PrefillHandOver:
    """What the prefill side owes the decode side for one request."""

    def __init__(self) -> None:
        self.state = PrefillState.QUEUED
        self._announced_pages = 0

    def ask(self) -> Ask:
        """Ask for the decode side's grant."""
        self._expect(PrefillState.QUEUED, "ask")
        self.state = PrefillState.ASKED
        return Ask()

    def on_grant(self) -> None:
        """The decode side has reserved the prompt."""
        self._expect(PrefillState.ASKED, "grant")
        self.state = PrefillState.GRANTED

    def announce(
        self, pages: Sequence[int], settled_tokens: int, page_size: int
    ) -> Announce | None:
        """The whole pages that `settled_tokens` have completed since the last time, if any."""
        self._expect(PrefillState.GRANTED, "announce")
        return self._next(pages, settled_tokens // page_size, None)

    def announce_last(self, pages: Sequence[int], first_token: int) -> Announce:
        """The pages that are left, the unaligned last one included, and the first token."""
        self._expect(PrefillState.GRANTED, "announce_last")
        self.state = PrefillState.ANNOUNCED
        last = self._next(pages, len(pages), first_token)
        assert last is not None
        return last

    def on_done(self) -> Released:
        """The decode side has read everything: its verdict is this side's to give."""
        self._expect(PrefillState.ANNOUNCED, "done")
        self.state = PrefillState.RELEASED
        return Released(valid=True)

    def end(self, reason: EndReason, detail: str = "") -> Ended | None:
        """Leave early; what to tell the decode side, if it still waits for anything."""
        if self.state in (PrefillState.RELEASED, PrefillState.ENDED):
            return None
        self.state = PrefillState.ENDED
        return Ended(reason, detail)

    def _next(self, pages: Sequence[int], upto: int, first_token: int | None) -> Announce | None:
        first = self._announced_pages
        if upto <= first and first_token is None:
            return None
        self._announced_pages = upto
        return Announce(first, tuple(pages[first:upto]), first_token)

    def _expect(self, state: PrefillState, action: str) -> None:
        if self.state is not state:
            raise ProtocolError(f"{action} while {self.state.name}")


class DecodeHandOver:
    """What the decode side knows of one request's prompt on its way here."""

    def __init__(self, prompt_pages: int) -> None:
        self.state = DecodeState.OPEN
        self.first_token: int | None = None
        self._prompt_pages = prompt_pages
        self._announced_pages = 0
        self._reads = 0

    def on_ask(self) -> None:
        """The prefill side is ready for this request."""
        self._expect(DecodeState.OPEN, "ask")
        self.state = DecodeState.ASKED

    def grant(self) -> Grant:
        """The whole prompt is reserved here."""
        self._expect(DecodeState.ASKED, "grant")
        self.state = DecodeState.GRANTED
        return Grant()

    def on_announce(self, message: Announce) -> None:
        """Check an announcement; those of its pages that are missing here are then to be read.

        Raises:
            ProtocolError: pages are missing, named twice, or too many.
        """
        self._expect(DecodeState.GRANTED, "announcement")
        upto = message.first_page + len(message.page_ids)
        last = message.first_token is not None
        if message.first_page != self._announced_pages or upto > self._prompt_pages:
            raise ProtocolError(
                f"pages [{message.first_page}, {upto}) announced after {self._announced_pages} "
                f"of {self._prompt_pages}"
            )
        if last and upto != self._prompt_pages:
            raise ProtocolError(f"{upto} of {self._prompt_pages} pages announced in all")
        self._announced_pages = upto
        if last:
            self.first_token = message.first_token
            self.state = DecodeState.ANNOUNCED

    def begin_read(self) -> None:
        """A read of announced pages begins."""
        self._reads += 1

    def on_read(self) -> None:
        """One read has ended well."""
        self._reads -= 1

    def done(self) -> Done | None:
        """What to say once everything is announced and read; `None` before."""
        if self.state is not DecodeState.ANNOUNCED or self._reads:
            return None
        self.state = DecodeState.READ
        return Done()

    def on_released(self, message: Released) -> bool:
        """Whether the pages may be used."""
        self._expect(DecodeState.READ, "released")
        if message.valid:
            self.state = DecodeState.VALID
        return message.valid

    def _expect(self, state: DecodeState, action: str) -> None:
        if self.state is not state:
            raise ProtocolError(f"{action} while {self.state.name}")
