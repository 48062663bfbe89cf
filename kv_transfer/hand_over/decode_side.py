"""The decode side of a hand-over: what to send, what to read, and when all pages are here."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.announced_pages import AnnouncedPages
from kvrelay.kv_transfer.hand_over.states import DECODE_STEPS, DecodeState, next_state
from kvrelay.wire.hand_over import (
    Announce,
    Ask,
    Done,
    FirstToken,
    Grant,
    Held,
    History,
    PagePlace,
    PageRun,
    PageSum,
    Released,
)


class DecodeHandOver:
    """One request's hand-over on the decode side.

    Every method that takes a step raises `ProtocolError` if `states.DECODE_STEPS` does not
    allow it now.

    Args:
        prompt_pages: pages of the whole prompt.
        windowed: for each pool, whether its layers have a sliding window.
        choices: outputs that are wanted.
    """

    def __init__(
        self, prompt_pages: int, windowed: Sequence[bool] = (False,), choices: int = 1
    ) -> None:
        self.state = DecodeState.OPEN
        self.begun = False
        """Whether the prefill side computes the prompt, or has announced some of it from its
        device."""
        self._was_held = False
        self._is_lent = False
        self.lent_differs = False
        """Whether the prefill side has read other bytes than were lent: either side's may be
        wrong."""
        self.first_tokens: tuple[FirstToken, ...] = ()
        """The first token of each output; empty until the last announcement."""
        self.known_tokens = 0
        """The tokens at the prompt's beginning that the prefill side has."""
        self.num_compared = 0
        """The number of pages whose checksums were sent to the prefill side."""
        self._choices = choices
        self._prompt_pages = prompt_pages
        self._windowed = windowed
        self._announced = AnnouncedPages(prompt_pages, windowed, ())
        self._reads_running = 0

    @property
    def has_read(self) -> bool:
        """Whether all pages are announced, and every read has ended well."""
        return self.state is DecodeState.ANNOUNCED and not self._reads_running

    @property
    def places_read(self) -> list[PagePlace]:
        """The pages that were read, or will be."""
        return self._announced.places

    def on_ask(self, message: Ask) -> None:
        """Note that the prefill side is ready for this request."""
        self._step("ask")
        self.known_tokens = message.known_tokens

    @property
    def is_held(self) -> bool:
        """Whether the prefill side was told that the grant waits, and has not got the grant yet."""
        return self._was_held and self.state is DecodeState.ASKED

    def hold(self) -> Held | None:
        """Make the message that the grant waits for another request; None after the first time."""
        self._step("hold")
        told, self._was_held = self._was_held, True
        return None if told else Held()

    def grant(
        self, missing: Sequence[int], history: History | None = None, *, reads_host: bool = True
    ) -> Grant:
        """Make the grant: the whole prompt is reserved here.

        Args:
            missing: for each pool the first page to read.
            history: the pages that the prefill side may read from here.
            reads_host: whether pages of the prefill side's host may be announced.
        """
        self._step("grant")
        self._announced = AnnouncedPages(self._prompt_pages, self._windowed, missing)
        self._is_lent = history is not None
        return Grant(history, reads_host)

    @property
    def is_lent(self) -> bool:
        """Whether the prefill side may read pages from here."""
        return self._is_lent and self.state is DecodeState.GRANTED and not self.begun

    def on_loaded(self, message: Done) -> Released | None:
        """Note that the prefill side has read the lent pages. Returns this side's verdict.

        Returns `None` if the message has checksums: compare them and call `on_load_verified`.
        """
        if not self.is_lent:
            raise ProtocolError("pages were read that are not lent")
        self._step("loaded")
        if message.sums:
            return None
        self._is_lent = False
        return Released(valid=True)

    def on_load_verified(self, mismatches: int) -> Released:
        """Note that the prefill side's checksums were compared. Returns the verdict.

        Args:
            mismatches: pages whose sums differ.
        """
        self._is_lent, self.lent_differs = False, mismatches > 0
        return Released(valid=not mismatches, mismatches=mismatches)

    def on_begun(self) -> None:
        """Note that the prefill side computes the prompt's first chunk."""
        self._step("begun")
        self.begun = True

    def on_announce(self, message: Announce) -> tuple[PageRun, ...]:
        """Check an announcement.

        Returns:
            The pages of it to read, a run for each pool. Unless all are empty, one read fetches
            them together, and `on_read` follows.

        Raises:
            ProtocolError: its pages or tokens are not the next ones that must come.
        """
        last = bool(message.first_tokens)
        if last and message.from_host:
            raise ProtocolError("the last pages are announced from the host")
        state = next_state(DECODE_STEPS, "announce_last" if last else "announce", self.state)
        if last:
            self._check_first_tokens(message.first_tokens)
        to_read = self._announced.add(message.runs, last=last)
        self._reads_running += any(run.page_ids for run in to_read)
        self.first_tokens = message.first_tokens
        if not message.from_host:  # those of the host were there before
            self.begun = True
        self.state = state
        return to_read

    def on_read(self) -> None:
        """Note that one read has ended well."""
        self._reads_running -= 1

    def done(self, sums: Sequence[PageSum] = ()) -> Done:
        """Make the message that all pages were read. Call it once `has_read` is true.

        Args:
            sums: checksums of the pages to compare.
        """
        assert self.has_read, f"done while {self.state.name}"
        self._step("done")
        self.num_compared = len(sums)
        return Done(tuple(sums))

    def on_released(self, message: Released) -> bool:
        """Take the prefill side's answer to `Done`. Returns whether the pages may be used."""
        self._step("released" if message.valid else "released_as_invalid")
        return message.valid

    def _check_first_tokens(self, tokens: Sequence[FirstToken]) -> None:
        if len(tokens) != self._choices:
            raise ProtocolError(f"{len(tokens)} first tokens of {self._choices}")
        if all(token.finished for token in tokens):
            raise ProtocolError("every output is finished: there is nothing to hand over")

    def _step(self, step: str) -> None:
        self.state = next_state(DECODE_STEPS, step, self.state)
