"""The decode side of a hand-over: what to send, what to read, and when everything is here."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.announced_pages import AnnouncedPages
from kvrelay.kv_transfer.hand_over.states import DECODE_STEPS, DecodeState, next_state
from kvrelay.wire.hand_over import (
    Announce,
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
        """The prefill side computes the prompt, or has announced some of it from its device."""
        self._was_held = False
        self._is_lent = False
        self.lent_differs = False
        """What was lent is not what the prefill side has read: either may be wrong."""
        self.first_tokens: tuple[FirstToken, ...] = ()
        """One for each output; empty until the last announcement."""
        self.num_compared = 0
        """Pages whose checksums were sent to the prefill side."""
        self._choices = choices
        self._prompt_pages = prompt_pages
        self._windowed = windowed
        self._announced = AnnouncedPages(prompt_pages, windowed, ())
        self._reads_running = 0

    @property
    def has_read(self) -> bool:
        """Everything is announced, and every read has ended well."""
        return self.state is DecodeState.ANNOUNCED and not self._reads_running

    @property
    def places_read(self) -> list[PagePlace]:
        """The pages that were read, or will be."""
        return self._announced.places

    def on_ask(self) -> None:
        """The prefill side is ready for this request."""
        self._step("ask")

    @property
    def is_held(self) -> bool:
        """The prefill side was told that the grant waits, and has not got it."""
        return self._was_held and self.state is DecodeState.ASKED

    def hold(self) -> Held | None:
        """Tell the prefill side that the grant waits for another request; once."""
        self._step("hold")
        told, self._was_held = self._was_held, True
        return None if told else Held()

    def grant(
        self, missing: Sequence[int], history: History | None = None, *, reads_host: bool = True
    ) -> Grant:
        """Tell the prefill side that the whole prompt is reserved here.

        Args:
            missing: for each pool the first page that is to be read.
            history: what the prefill side may read from here.
            reads_host: pages of the prefill side's host may be announced.
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
        """The prefill side has read what it was lent. Returns the verdict, which is this side's.

        `None` if the message has checksums: compare them and call `on_load_verified`.
        """
        if not self.is_lent:
            raise ProtocolError("pages were read that are not lent")
        self._step("loaded")
        if message.sums:
            return None
        self._is_lent = False
        return Released(valid=True)

    def on_load_verified(self, mismatches: int) -> Released:
        """The prefill side's checksums were compared. Returns the verdict.

        Args:
            mismatches: pages whose sums differ.
        """
        self._is_lent, self.lent_differs = False, mismatches > 0
        return Released(valid=not mismatches, mismatches=mismatches)

    def on_begun(self) -> None:
        """The prefill side computes the prompt's first chunk."""
        self._step("begun")
        self.begun = True

    def on_announce(self, message: Announce) -> tuple[PageRun, ...]:
        """Check an announcement.

        Returns:
            what is to be read of it, a run for each pool. Unless all are empty, one read
            fetches them together, and `on_read` follows.

        Raises:
            ProtocolError: its pages or tokens are not those that have to come now.
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
        """One read has ended well."""
        self._reads_running -= 1

    def done(self, sums: Sequence[PageSum] = ()) -> Done:
        """Tell the prefill side that everything was read. Call it once `has_read` is true.

        Args:
            sums: checksums of the pages that are to be compared.
        """
        assert self.has_read, f"done while {self.state.name}"
        self._step("done")
        self.num_compared = len(sums)
        return Done(tuple(sums))

    def on_released(self, message: Released) -> bool:
        """The prefill side has answered `Done`. Returns whether the pages may be used."""
        self._step("released" if message.valid else "released_as_invalid")
        return message.valid

    def _check_first_tokens(self, tokens: Sequence[FirstToken]) -> None:
        if len(tokens) != self._choices:
            raise ProtocolError(f"{len(tokens)} first tokens of {self._choices}")
        if all(token.finished for token in tokens):
            raise ProtocolError("every output is finished: there is nothing to hand over")

    def _step(self, step: str) -> None:
        self.state = next_state(DECODE_STEPS, step, self.state)
