"""Lets decode workers read pages of the host tier, which are not waited for on the device.

A prompt's prefix that lies on the host alone is needed on the device as well: what follows is
computed behind it. But its decode worker has memory from the grant on, and reads it from the host
while it comes to the device, while the prompt waits for memory, or while it is computed. The pages
are held as announced pages of the device are: until the stream ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvrelay.engine.faults import FaultPhase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.wire.hand_over import Announce


class HostReads:
    """Announces pages of the host, and holds them.

    Args:
        context: has the tier.
        announce: tells a request's decode worker of pages.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        announce: Callable[[PrefillRequest, Announce | None], None],
    ) -> None:
        self._context = context
        self._announce = announce

    def offer(self, request: PrefillRequest) -> None:
        """Announce what the host has of a prompt behind what was announced, if it has anything.

        Args:
            request: granted; what its decode worker lends is not to be read any more.
        """
        tier, hand_over = self._context.host_tier, request.hand_over
        if tier is None or not hand_over.may_announce_host:
            return
        if request.host_looked_at == tier.version:
            return
        request.host_looked_at = tier.version
        known = request.input_ids[: request.reusable_len]
        if not request.tier_keys:
            request.tier_keys = tier.hash(known, request.namespace)
        pages = tier.lend(known, request.tier_keys, hand_over.announced_pages)
        if not pages:
            return
        request.lent += pages
        self._announce(request, hand_over.announce_host([page.slot for page in pages]))
        self._context.faults.reach(FaultPhase.LENDING, request.decode_incarnation)

    def take_back(self, request: PrefillRequest) -> None:
        """The request is released: what its decode worker reads now will not be used."""
        if request.lent:
            tier = self._context.host_tier
            assert tier is not None
            tier.take_back(request.lent)
            request.lent = []

    def as_announced(self, request: PrefillRequest, pages: Iterable[LocalPage]) -> list[LocalPage]:
        """Pages of a request where its decode worker was told to read them.

        Args:
            request: has its whole prompt on the device.
            pages: of it, there.
        """
        slots = {page.place: page.slot for page in request.lent}
        windowed = self._context.kv_cache.shape.windowed
        return [
            replace(page, page_id=slots[page.place.page], in_host=True)
            if page.place.page in slots and not windowed[page.place.pool]
            else page
            for page in pages
        ]
