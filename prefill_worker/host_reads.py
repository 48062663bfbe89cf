"""The pages of the host tier that decode workers read without waiting for them on the device.

A prompt's prefix that lies on the host alone is needed on the device as well, because the rest is
computed behind it. But its decode worker has memory from the grant on. It reads the prefix from the
host meanwhile: while it is loaded, while the prompt waits for memory, or while it is computed.

The pages are held like announced pages of the device: until the stream ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.tier_loads import TierLoads
from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.wire.hand_over import Announce


class HostReads:
    """The pages of the host that are announced, and held.

    Args:
        context: has the tier.
        loads: knows the requests' page hashes.
        announce: sends pages to a request's decode worker.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        loads: TierLoads[PrefillRequest],
        announce: Callable[[PrefillRequest, Announce | None], None],
    ) -> None:
        self._context = context
        self._loads = loads
        self._announce = announce

    def offer(self, request: PrefillRequest) -> None:
        """Announce the host's pages of a prompt behind those that were announced, if there are any.

        Args:
            request: granted; its decode worker's history is not to be read any more.
        """
        tier, hand_over = self._context.host_tier, request.hand_over
        if tier is None or not hand_over.may_announce_host:
            return
        if request.host_looked_at == tier.version:
            return
        request.host_looked_at = tier.version
        known = request.input_ids[: request.reusable_len]
        pages = tier.lend(known, self._loads.keys_of(request, known), hand_over.announced_pages)
        if not pages:
            return
        request.lent += pages
        self._announce(request, hand_over.announce_host([page.slot for page in pages]))
        request.enter(Phase.LENDING)

    def take_back(self, request: PrefillRequest) -> None:
        """Take back the pages of a released request; reads of them will not be used."""
        if request.lent:
            tier = self._context.host_tier
            assert tier is not None
            tier.take_back(request.lent)
            request.lent = []

    def as_announced(self, request: PrefillRequest, pages: Iterable[LocalPage]) -> list[LocalPage]:
        """Locate pages of a request where its decode worker was told to read them.

        Args:
            request: has its whole prompt on the device.
            pages: some of its pages, on the device.
        """
        slots = {page.place: page.slot for page in request.lent}
        windowed = self._context.kv_cache.shape.windowed
        return [
            replace(page, page_id=slots[page.place.page], in_host=True)
            if page.place.page in slots and not windowed[page.place.pool]
            else page
            for page in pages
        ]
