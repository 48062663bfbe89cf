"""The decode side's account of announced pages: whether they are complete, and which to read."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.wire.hand_over import PagePlace, PageRun


class AnnouncedPages:
    """The announced pages of one prompt.

    A pool without a window is announced from its first page on, each page once. A window's pages
    come all at once, with the last announcement.

    Args:
        prompt_pages: pages of the whole prompt.
        windowed: for each pool, whether its layers have a sliding window.
        missing: for each pool the first page to read; those before it are here.
    """

    def __init__(self, prompt_pages: int, windowed: Sequence[bool], missing: Sequence[int]) -> None:
        self._prompt_pages = prompt_pages
        self._windowed = windowed
        self._missing = missing
        self._num_announced = 0
        """The number of announced pages at the start of every pool without a window."""
        self._to_read: list[tuple[PageRun, ...]] = []

    def add(self, runs: Sequence[PageRun], *, last: bool) -> tuple[PageRun, ...]:
        """Take one announcement.

        Args:
            runs: the announced pages, one run for each pool.
            last: whether it is the last announcement.

        Returns:
            The pages of it to read, a run for each pool.

        Raises:
            ProtocolError: pages are missing, named twice, or too many. Nothing has changed.
        """
        if len(runs) != len(self._windowed):
            raise ProtocolError(f"{len(runs)} pools announced of {len(self._windowed)}")
        num_announced = self._num_announced
        for run, windowed, missing in zip(runs, self._windowed, self._missing, strict=True):
            if windowed:
                self._check_window(run, missing, last)
            else:
                self._check_full(run, last)
                num_announced = run.end
        self._num_announced = num_announced
        to_read = tuple(map(PageRun.since, runs, self._missing))
        self._to_read.append(to_read)
        return to_read

    @property
    def places(self) -> list[PagePlace]:
        """The pages that were read, or will be, in the order of their announcements."""
        return [
            PagePlace(pool, page)
            for runs in self._to_read
            for pool, run in enumerate(runs)
            for page in range(run.first_page, run.end)
        ]

    def _check_full(self, run: PageRun, last: bool) -> None:
        before, whole = self._num_announced, self._prompt_pages
        if run.first_page != before or run.end > whole:
            raise ProtocolError(
                f"pages [{run.first_page}, {run.end}) announced after {before} of {whole}"
            )
        if last and run.end != whole:
            raise ProtocolError(f"{run.end} of {whole} pages announced in all")

    def _check_window(self, run: PageRun, missing: int, last: bool) -> None:
        if not last and run.page_ids:
            raise ProtocolError("a window's pages are announced before the prompt is complete")
        complete = run.first_page <= missing and run.end == self._prompt_pages
        if last and not complete:
            raise ProtocolError(
                f"pages [{run.first_page}, {run.end}) of the window [{missing}, "
                f"{self._prompt_pages}) announced"
            )
