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
               <-- Done (sums of pages) --------  READ      (every read ended well)
    VERIFYING                                               (only if there are sums)
    RELEASED   --- Released(valid) ------------>  VALID     (may be activated)

Either side may leave at any point: the prefill side by `Ended`, the decode
side by closing the stream.

Messages are numbered, each side's by themselves (`Words`). Now and then the
decode side sends a `Beat`, which the prefill side answers: so either finds out
when a message was lost, or when nobody answers any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Generic, TypeVar

from kvrelay.kv_transfer.checksums import PageSum, Place
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
class PageRun:
    """Pages of one pool that follow each other in a request's page table."""

    first_page: int
    page_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.first_page + len(self.page_ids)

    def since(self, page: int) -> PageRun:
        """What is left of it without the pages before `page`."""
        cut = min(max(0, page - self.first_page), len(self.page_ids))
        return PageRun(self.first_page + cut, self.page_ids[cut:])


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What one output of the prompt begins with."""

    token_id: int
    finished: bool = False
    """It is all of that output; the prefill side has said so to the router."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Pages that have settled, a run for each pool.

    Those of a window pool come with the last announcement: the ones that the
    window then holds.
    """

    runs: tuple[PageRun, ...]
    first_tokens: tuple[FirstToken, ...] = ()
    """Of every output that is wanted, in order; only on the last announcement."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every announced page was read."""

    sums: tuple[PageSum, ...] = ()
    """Of what was read: to be compared with what was announced."""


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to `Done`: whether the pages were held all along, and are the same."""

    valid: bool
    mismatches: int = 0
    """Pages whose sums differ; not valid, if there are any."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended on the prefill side."""

    reason: EndReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """Whoever says this is there; it has no number of its own, but that of the message before."""


FromDecode = Grant | Done | Beat
FromPrefill = Ask | Announce | Released | Ended | Beat
MessageT_co = TypeVar("MessageT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Said(Generic[MessageT_co]):
    """A message with its place among those of its side."""

    number: int
    """From 1 on; of a `Beat` that of the message before."""
    message: MessageT_co


MessageT = TypeVar("MessageT")


class Words:
    """Numbers what one side says on a stream, and checks the numbers of what it hears.

    Args:
        now: as far as one knows the other side is there, by the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = now
        """When the other side was last heard of."""
        self._said = 0
        self._heard = 0

    def say(self, message: MessageT) -> Said[MessageT]:
        """What to send."""
        if not isinstance(message, Beat):
            self._said += 1
        return Said(self._said, message)

    def hear(self, said: Said[object], now: float) -> bool:
        """Whether to heed a message: not if it came before.

        Raises:
            ProtocolError: one before it has not come, and never will: a stream keeps the order.
        """
        self.heard_at = now
        is_beat = isinstance(said.message, Beat)
        expected = self._heard if is_beat else self._heard + 1
        if said.number > expected:
            raise ProtocolError(f"{said.number - expected} messages were lost")
        if is_beat or said.number < expected:
            return is_beat
        self._heard = said.number
        return True


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
    VERIFYING = auto()
    """The decode side has read; what it read is compared."""
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
    """What the prefill side owes the decode side for one request.

    Args:
        windowed: for each pool, whether its layers have a window.
    """

    def __init__(self, windowed: Sequence[bool] = (False,)) -> None:
        self.state = PrefillState.QUEUED
        self._windowed = windowed
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

    def announce(self, tables: Sequence[Sequence[int]], settled_pages: int) -> Announce | None:
        """The first `settled_pages` of each pool's page table, but for what was announced."""
        self._expect(PrefillState.GRANTED, "announce")
        first = self._announced_pages
        if settled_pages <= first or all(self._windowed):
            return None
        self._announced_pages = settled_pages
        return Announce(
            tuple(
                PageRun(0) if windowed else PageRun(first, tuple(table[first:settled_pages]))
                for table, windowed in zip(tables, self._windowed, strict=True)
            )
        )

    def announce_last(
        self,
        tables: Sequence[Sequence[int]],
        first_pages: Sequence[int],
        first_tokens: Sequence[FirstToken],
    ) -> Announce:
        """What is left of each pool's page table, the unaligned last page too, and the tokens.

        `first_pages` are the first that a window still holds, for each pool.
        """
        self._expect(PrefillState.GRANTED, "announce_last")
        self.state = PrefillState.ANNOUNCED
        firsts = [
            held if windowed else self._announced_pages
            for held, windowed in zip(first_pages, self._windowed, strict=True)
        ]
        runs = (PageRun(n, tuple(table[n:])) for table, n in zip(tables, firsts, strict=True))
        return Announce(tuple(runs), tuple(first_tokens))

    @property
    def is_announced(self) -> bool:
        """The decode side has all that it needs to go on, but for the verdict."""
        return self.state in (PrefillState.ANNOUNCED, PrefillState.VERIFYING)

    def on_done(self, message: Done) -> Released | None:
        """The decode side has read everything: its verdict is this side's to give.

        `None` if it has told sums: `on_verified` is to follow.
        """
        self._expect(PrefillState.ANNOUNCED, "done")
        if message.sums:
            self.state = PrefillState.VERIFYING
            return None
        self.state = PrefillState.RELEASED
        return Released(valid=True)

    def on_verified(self, mismatches: int) -> Released:
        """What the decode side has read was compared."""
        self._expect(PrefillState.VERIFYING, "verified")
        self.state = PrefillState.RELEASED
        return Released(valid=not mismatches, mismatches=mismatches)

    def end(self, reason: EndReason, detail: str = "") -> Ended | None:
        """Leave early; what to tell the decode side, if it still waits for anything."""
        if self.state in (PrefillState.RELEASED, PrefillState.ENDED):
            return None
        self.state = PrefillState.ENDED
        return Ended(reason, detail)

    def _expect(self, state: PrefillState, action: str) -> None:
        if self.state is not state:
            raise ProtocolError(f"{action} while {self.state.name}")


class DecodeHandOver:
    """What the decode side knows of one request's prompt on its way here.

    Args:
        prompt_pages: of the whole prompt.
        windowed: for each pool, whether its layers have a window.
        choices: outputs that are wanted.
    """

    def __init__(
        self, prompt_pages: int, windowed: Sequence[bool] = (False,), choices: int = 1
    ) -> None:
        self.state = DecodeState.OPEN
        self.first_tokens: tuple[FirstToken, ...] = ()
        self._choices = choices
        self._prompt_pages = prompt_pages
        self._windowed = windowed
        self._missing: Sequence[int] = ()
        self._announced_pages = 0
        self._reads_running = 0
        self._wanted: list[tuple[PageRun, ...]] = []
        self.num_compared = 0
        """Pages whose sums were told to the prefill side."""

    def on_ask(self) -> None:
        """The prefill side is ready for this request."""
        self._expect(DecodeState.OPEN, "ask")
        self.state = DecodeState.ASKED

    def grant(self, missing: Sequence[int]) -> Grant:
        """The whole prompt is reserved here; `missing` is each pool's first page to be read."""
        self._expect(DecodeState.ASKED, "grant")
        self.state = DecodeState.GRANTED
        self._missing = missing
        return Grant()

    def on_announce(self, message: Announce) -> tuple[PageRun, ...]:
        """Check an announcement; what is to be read of it, a run for each pool, by one read.

        By none, if all of them are empty.

        Raises:
            ProtocolError: pages are missing, named twice, or too many.
        """
        self._expect(DecodeState.GRANTED, "announcement")
        last = bool(message.first_tokens)
        if last and len(message.first_tokens) != self._choices:
            raise ProtocolError(f"{len(message.first_tokens)} first tokens of {self._choices}")
        if last and all(first.finished for first in message.first_tokens):
            raise ProtocolError("every output is finished: there is nothing to hand over")
        if len(message.runs) != len(self._windowed):
            raise ProtocolError(f"{len(message.runs)} pools announced of {len(self._windowed)}")
        upto = self._announced_pages
        for run, windowed, missing in zip(message.runs, self._windowed, self._missing, strict=True):
            if windowed:
                self._check_window(run, missing, last)
            else:
                upto = self._check_full(run, last)
        self._announced_pages = upto
        if last:
            self.first_tokens = message.first_tokens
            self.state = DecodeState.ANNOUNCED
        wanted = tuple(map(PageRun.since, message.runs, self._missing))
        self._reads_running += any(run.page_ids for run in wanted)
        self._wanted.append(wanted)
        return wanted

    def _check_full(self, run: PageRun, last: bool) -> int:
        announced, whole = self._announced_pages, self._prompt_pages
        if run.first_page != announced or run.end > whole:
            raise ProtocolError(
                f"pages [{run.first_page}, {run.end}) announced after {announced} of {whole}"
            )
        if last and run.end != whole:
            raise ProtocolError(f"{run.end} of {whole} pages announced in all")
        return run.end

    def _check_window(self, run: PageRun, missing: int, last: bool) -> None:
        if not last and run.page_ids:
            raise ProtocolError("a window's pages are announced before the prompt is complete")
        complete = run.first_page <= missing and run.end == self._prompt_pages
        if last and not complete:
            raise ProtocolError(
                f"pages [{run.first_page}, {run.end}) of the window [{missing}, "
                f"{self._prompt_pages}) announced"
            )

    def on_read(self) -> None:
        """One read has ended well."""
        self._reads_running -= 1

    @property
    def has_read(self) -> bool:
        """Everything is announced, and every read has ended well."""
        return self.state is DecodeState.ANNOUNCED and not self._reads_running

    @property
    def places_read(self) -> list[Place]:
        """The pages that were read, or will be."""
        return [
            Place(pool, page)
            for runs in self._wanted
            for pool, run in enumerate(runs)
            for page in range(run.first_page, run.end)
        ]

    def done(self, sums: Sequence[PageSum] = ()) -> Done:
        """What to say once everything was read, and hashed, if it is to be compared."""
        assert self.has_read, f"done while {self.state.name}"
        self.state = DecodeState.READ
        self.num_compared = len(sums)
        return Done(tuple(sums))

    def on_released(self, message: Released) -> bool:
        """Whether the pages may be used."""
        self._expect(DecodeState.READ, "released")
        if message.valid:
            self.state = DecodeState.VALID
        return message.valid

    def _expect(self, state: DecodeState, action: str) -> None:
        if self.state is not state:
            raise ProtocolError(f"{action} while {self.state.name}")
