"""The prefill side of a hand-over: what to send, and which of its own pages to announce."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv_transfer.hand_over.states import PREFILL_STEPS, PrefillState, next_state
from kvrelay.wire.hand_over import (
    Announce,
    Ask,
    Begun,
    Done,
    Ended,
    FirstToken,
    Grant,
    HandOverEnd,
    PageRun,
    PageSum,
    Released,
)


class PrefillHandOver:
    """One request's hand-over on the prefill side.

    Every method but `end` raises `ProtocolError` if `states.PREFILL_STEPS` does not allow its
    step now.

    Args:
        windowed: for each pool, whether its layers have a sliding window.
    """

    def __init__(self, windowed: Sequence[bool] = (False,)) -> None:
        self.state = PrefillState.QUEUED
        self._windowed = windowed
        self._announced_pages = 0
        self._has_begun = False
        self._may_announce_host = False
        self.is_held = False
        """Whether the decode side lets the request wait for another one, and has not granted it
        yet.

        The decode side does not say when that wait is over and the request waits for memory.
        """

    @property
    def announced_pages(self) -> int:
        """The number of whole pages at the prompt's start that were announced so far."""
        return self._announced_pages

    @property
    def may_announce_host(self) -> bool:
        """Whether pages of the host may be announced now."""
        is_granted = self.state is PrefillState.GRANTED
        return is_granted and self._may_announce_host and not all(self._windowed)

    @property
    def is_announced(self) -> bool:
        """Whether the decode side has all that it needs to go on, except the verdict."""
        return self.state in (PrefillState.ANNOUNCED, PrefillState.VERIFYING)

    def ask(self, known_tokens: int = 0) -> Ask:
        """Make the message that asks for the decode side's grant.

        Args:
            known_tokens: see `Ask`.
        """
        self._step("ask")
        return Ask(known_tokens)

    def on_held(self) -> None:
        """Note that the decode side lets the request wait for another one, and grants it later."""
        self._step("held")
        self.is_held = True

    def on_grant(self, message: Grant) -> None:
        """Note that the decode side has reserved the prompt."""
        self._step("grant")
        self.is_held = False
        self._may_announce_host = message.reads_host

    def load(self) -> None:
        """Note that the decode side's part of the prompt is being read, before any announcement."""
        assert not self._announced_pages, "what is announced cannot be read"
        self._step("load")

    def loaded(self, sums: Sequence[PageSum] = ()) -> Done:
        """Make the message that the decode side's part was read.

        Args:
            sums: checksums of the pages to compare.
        """
        self._step("loaded")
        return Done(tuple(sums))

    def on_load_released(self, message: Released) -> bool:
        """Take the decode side's answer. Returns whether the pages that were read may be used."""
        self._step("load_released" if message.valid else "load_released_as_invalid")
        return message.valid

    def begin(self) -> Begun | None:
        """Make the message that the first chunk is computed. `None` if the decode side knows it."""
        self._step("begin")
        known, self._has_begun = self._has_begun, True
        return None if known else Begun()

    def announce(self, tables: Sequence[Sequence[int]], written_pages: int) -> Announce | None:
        """Announce written pages that were not announced yet. Returns `None` if there are none.

        Args:
            tables: the page table of each pool.
            written_pages: how many whole pages at each table's start are written.
        """
        self._step("announce")
        first = self._announced_pages
        if written_pages <= first or all(self._windowed):
            return None
        self._has_begun = True
        return Announce(self._runs([table[first:written_pages] for table in tables]))

    def announce_host(self, page_ids: Sequence[int]) -> Announce:
        """Announce the next whole pages, which lie in the host's pools.

        Pages of windows come with the last announcement, as always.

        Args:
            page_ids: the same in each of the host's pools; at least one. They are held until the
                stream ends.
        """
        assert self.may_announce_host, "the decode side does not read the host"
        self._step("announce")
        return Announce(self._runs([page_ids] * len(self._windowed)), from_host=True)

    def _runs(self, page_ids: Sequence[Sequence[int]]) -> tuple[PageRun, ...]:
        """Make runs of the next pages of pools without a window, and count them as announced."""
        first = self._announced_pages
        runs = tuple(
            PageRun(0) if windowed else PageRun(first, tuple(ids))
            for ids, windowed in zip(page_ids, self._windowed, strict=True)
        )
        self._announced_pages = max(run.end for run in runs)
        return runs

    def announce_last(
        self,
        tables: Sequence[Sequence[int]],
        first_pages: Sequence[int],
        first_tokens: Sequence[FirstToken],
    ) -> Announce:
        """Announce the rest of the prompt: the unaligned last page and windows' pages, too.

        Args:
            tables: the page table of each pool.
            first_pages: for each pool the first page that its window still holds.
            first_tokens: one for each output.
        """
        self._step("announce_last")
        firsts = [
            held if windowed else self._announced_pages
            for held, windowed in zip(first_pages, self._windowed, strict=True)
        ]
        runs = (PageRun(n, tuple(table[n:])) for table, n in zip(tables, firsts, strict=True))
        return Announce(tuple(runs), tuple(first_tokens))

    def on_done(self, message: Done) -> Released | None:
        """Note that the decode side has read everything. Returns this side's verdict.

        Returns `None` if the message has checksums: compare them and call `on_verified`.
        """
        if message.sums:
            self._step("done_with_sums")
            return None
        self._step("done")
        return Released(valid=True)

    def on_verified(self, mismatches: int) -> Released:
        """Note that the decode side's checksums were compared. Returns the verdict.

        Args:
            mismatches: pages whose sums differ.
        """
        self._step("verified")
        return Released(valid=not mismatches, mismatches=mismatches)

    def end(self, reason: HandOverEnd, detail: str = "") -> Ended | None:
        """Leave early. Returns the message for the decode side, `None` if it waits for nothing."""
        if self.state not in PREFILL_STEPS["end"]:
            return None
        self._step("end")
        return Ended(reason, detail)

    def _step(self, step: str) -> None:
        self.state = next_state(PREFILL_STEPS, step, self.state)
