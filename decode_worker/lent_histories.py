"""The pages of prompts that are lent to the prefill workers that lack them: a hand-over in reverse.

They are the pages that a turn's session keeps, or those that the prefix index has of any prompt. So
a conversation's last answer is found without a session, too. A prefill worker reads them between
the grant and its first announcement. The request's lease holds them all that time, and its stream
is the lease on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.request import (
    AgentReadable,
    DecodeRequest,
    HandedOverRequest,
    LentHashed,
)
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.commands import Mailbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.kv_transfer.checksums import locate
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.kv_transfer.verify_pages import count_mismatches
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.hand_over import Done, History, PageRun
from kvrelay.wire.load import PeerTransport

_MOST_UNREAD: Final = 1000
"""The most requests that are remembered."""


class LentHistories:
    """The histories that are offered with grants, and confirmed once they were read.

    Args:
        context: the worker's memory and requests.
        requests: sends the answers.
        agent: is read, and hashes.
        inbox: where the agent reports.
        probes: the measured transport to each prefill worker.
        least_bytes_per_second: the slowest transport to a prefill worker that is lent anything.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        agent: Transfers,
        inbox: Mailbox[AgentReadable | LentHashed],
        probes: Mapping[str, PeerTransport],
        least_bytes_per_second: float,
    ) -> None:
        self._context = context
        self._requests = requests
        self._agent = agent
        self._inbox = inbox
        self._probes = probes
        self._least = least_bytes_per_second
        self._description: AgentDescription | None = None
        self._is_asked = False
        self._lent: set[HandedOverRequest] = set()
        self._unread: deque[tuple[str, str]] = deque(maxlen=_MOST_UNREAD)

    def expect(self, request: HandedOverRequest) -> None:
        """Become readable, because a turn has come whose session may be lent."""
        if self._context.session_turns.has_kv_of(request):
            self._be_readable()

    def _be_readable(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._agent.make_readable(lambda plain: self._inbox.post(AgentReadable(plain)))

    def readable(self, message: AgentReadable) -> None:
        """Note that this worker can be read from now on."""
        self._description = message.agent

    def with_speed(self, probe: PeerTransport) -> PeerTransport:
        """Add to a probe how fast the peer is expected to read sessions."""
        shape, speed = self._context.kv_cache.shape, probe.write_bytes_per_second
        if any(shape.windowed) or probe.refusal or speed < self._least:
            return probe
        tokens = speed * shape.page_size / self._agent.page_bytes
        return replace(probe, lent_tokens_per_second=tokens)

    def of(self, request: HandedOverRequest) -> History | None:
        """Find what a request that is granted now can be lent. Returns `None` if there is nothing.

        That is so if the prefill worker had as much when it asked. It is so, too, if an earlier
        attempt has ended while it might have been read, or while this worker cannot be read yet.
        """
        held, probe = request.held, self._probes.get(request.peer)
        pages = min(held.kv_committed_len, request.reusable_len) // held.page_size
        is_lacking = pages > request.hand_over.known_tokens // held.page_size
        if not is_lacking or _name(request) in self._unread:
            return None
        if probe is None or not probe.lent_tokens_per_second:
            return None
        self._be_readable()
        if self._description is None:
            return None
        runs = tuple(PageRun(0, tuple(table[:pages])) for table in held.tables())
        request.enter(Phase.BORROWING)
        return History(runs, self._description, probe.write_bytes_per_second)

    def answer(self, request: HandedOverRequest, done: Done) -> None:
        """Confirm the pages that were read, or hash them first if the prefill worker has sent sums.

        Raises `ProtocolError` if none were lent.
        """
        released, stream = request.hand_over.on_loaded(done), request.stream
        if released is not None:
            self._requests.send(request, released)
            return
        held = request.held
        try:
            places = [page.place for page in done.sums]
            pages = locate(places, held.tables(), held.page_size, held.kv_committed_len)
        except ValueError as error:
            raise ProtocolError(f"sums of what is not lent: {error}") from error
        self._agent.hash_pages(
            pages, lambda own: self._inbox.post(LentHashed(stream, own, done.sums))
        )

    def compare(self, hashed: LentHashed) -> None:
        """Tell the prefill worker which pages differ, if the request still lives.

        If any differs, this worker's copy may be wrong. So pages are no longer found from the first
        compared one on. Pages before it were not read, or are not known to be wrong.
        """
        request = self._requests.of_stream(hashed.stream)
        if request is not None and request.hand_over.is_lent:
            mismatches = count_mismatches(hashed.own, hashed.theirs)
            if mismatches:
                first = min(one.place.page for one in hashed.theirs)
                self._context.kv_cache.forget_found(request.held, request.input_ids, first)
            self._requests.send(request, request.hand_over.on_load_verified(mismatches))

    def serve(self) -> None:
        """Make progress with reads as long as something is lent."""
        live = self._context.requests.values()
        lent = {r for r in live if isinstance(r, HandedOverRequest) and r.hand_over.is_lent}
        for request in self._lent - lent:
            self._agent.end_serving()
            if request.has_ended:
                self._unread.append(_name(request))
        for _ in lent - self._lent:
            self._agent.begin_serving()
        self._lent = lent


def _name(request: HandedOverRequest) -> tuple[str, str]:
    """Name all attempts at a request."""
    return request.key.router, request.key.request_id
