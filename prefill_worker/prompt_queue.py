"""The requests of a prefill worker: those that wait, those that are computed, and their release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.admit_in_turn import AdmissionInTurn
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.prefix_waits import PrefixWaits
from kvrelay.engine.scheduler.prompts_in_progress import ComputingPrompts
from kvrelay.engine.scheduler.tier_loads import TierLoads
from kvrelay.kv_transfer.hand_over.states import PrefillState
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.mem_cache.release import Outcome
from kvrelay.prefill_worker.host_reads import HostReads
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.prefill_worker.sending import send
from kvrelay.wire.hand_over import Announce, Grant, HandOverEnd
from kvrelay.wire.output import NO_TIMINGS, RequestEnd

ASK_AHEAD = 4
"""The most requests of each decode worker that hold a grant, or have asked for one, before their
turn to compute. Requests that the decode worker has let wait for others do not count, even if they
wait for memory by now. The decode worker bounds how many these are, and they hold nothing.
`--grants-ahead` bounds the grants of a decode worker to all prefill workers."""
_HOLDS_GRANT = (
    PrefillState.ASKED, PrefillState.GRANTED, PrefillState.LOADING, PrefillState.LOADED
)  # fmt: skip


class PromptQueue:
    """The queue that decides which prompts get memory, and frees it.

    A request waits without memory, and asks its decode worker to reserve the whole prompt there.
    Once that is granted, it reserves its whole prompt here.

    Args:
        context: the worker's memory, requests and outputs.
        agent: makes progress for peers' reads while there may be any.
        bypass_limit: later requests that may pass one that does not fit.
        publish: give chunks to the prefix index as they are computed.
        prefix_wait: seconds without progress for which a request waits for another's prefix.
        begin_load: starts to read the pages that a request's decode worker has. `False` if none are
            to be read: the request is computed at once.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        agent: Transfers,
        bypass_limit: int,
        *,
        publish: bool,
        prefix_wait: float,
        begin_load: Callable[[PrefillRequest], bool],
    ) -> None:
        self._context = context
        self._agent = agent
        self._admission = AdmissionInTurn(context, self._reserve, bypass_limit)
        self._waits = PrefixWaits(
            context,
            prefix_wait,
            self._will_publish,
            at_end=lambda _: not publish,
            leads_for=_leads_for,
        )
        self._loads = TierLoads(context)
        self.host_reads = HostReads(context, self._loads, self.announce)
        """The pages that decode workers read on the host."""
        self._publish = publish
        self._begin_load = begin_load
        self._waiting: list[PrefillRequest] = []
        self.computing: ComputingPrompts[PrefillRequest] = ComputingPrompts(
            context, publish=publish
        )
        """The requests with memory, whose input is computed; it chooses the chunks of a step."""

    @property
    def waiting(self) -> Sequence[PrefillRequest]:
        """The requests without memory, in the order in which they came."""
        return self._waiting

    def add(self, request: PrefillRequest) -> None:
        """Queue a new request."""
        self._waiting.append(request)
        self._loads.prefetch(request, request.reusable_len)

    def reserve_granted(self) -> None:
        """Reserve memory for the requests that were granted, in turn, and announce cached pages.

        Requests that must still wait have their pages on the host announced.
        """
        granted = [r for r in self._waiting if r.hand_over.state is PrefillState.GRANTED]

        def must_wait(request: PrefillRequest) -> bool:
            return self._loads.must_wait(request, request.reusable_len)

        for request in self._admission.admit(granted, must_wait=must_wait):
            self._waiting.remove(request)
            if not self._begin_load(request):
                self.compute(request)
        for request in granted:
            if request.lease is None and request.history is None:
                self.host_reads.offer(request)

    def compute(self, request: PrefillRequest) -> None:
        """Compute the missing part of a request that has memory, and announce the rest."""
        self.computing.add(request)
        self.announce_written_pages(request)
        self.host_reads.offer(request)

    def _reserve(self, request: PrefillRequest) -> bool:
        return self._context.reserve(request, request.reusable_len)

    def ask_for_grants(self) -> None:
        """Ask the decode workers of the next requests to reserve memory, a few ahead for each.

        A request whose prefix is being computed does not ask, so it holds no grant.
        """
        ahead = [r for r in self._waiting if r.hand_over.state in _HOLDS_GRANT]
        asked = Counter(r.decode_incarnation for r in ahead if not r.hand_over.is_held)
        leaders = self._waits.leaders(self._context.requests.values())
        for request in sorted(self._waiting, key=lambda r: r.turn):
            if not request.can_ask or asked[request.decode_incarnation] >= ASK_AHEAD:
                continue
            if self._waits.must_wait(request, request.reusable_len, leaders):
                continue
            asked[request.decode_incarnation] += 1
            send(self._context, request, request.hand_over.ask(self._count_known(request)))
            # What a lower tier has of it comes while the decode worker looks for room.
            self._loads.must_wait(request, request.reusable_len)
            request.enter(Phase.ASKED)
            leaders.append(request)

    def _count_known(self, request: PrefillRequest) -> int:
        """Count the tokens at a prompt's beginning that its decode worker need not lend."""
        known = request.input_ids[: request.reusable_len]
        return self._context.kv_cache.count_cached(known, request.namespace)

    def _will_publish(self, request: PrefillRequest) -> bool:
        """Whether a request has asked for its grant, and has not published all of its input."""
        if request.hand_over.is_announced:
            return not self._publish
        return request.hand_over.state in _HOLDS_GRANT

    def take_grant(self, request: PrefillRequest, grant: Grant) -> None:
        """Note that the request's decode worker has reserved the prompt."""
        request.hand_over.on_grant(grant)
        request.enter(Phase.GRANTED)

    def announce_written_pages(self, request: PrefillRequest) -> None:
        """Announce the whole pages whose KV is written and that were not announced yet."""
        written_pages = request.kv_written_len // request.held.page_size
        self.announce(request, request.hand_over.announce(request.held.tables(), written_pages))

    def announce(self, request: PrefillRequest, message: Announce | None) -> None:
        """Announce pages, if any, to the decode worker, which may read them from then on."""
        if message is None:
            return
        if not request.announced:
            request.announced = True
            self._agent.begin_serving()
        send(self._context, request, message)

    def end_early(
        self,
        request: PrefillRequest,
        reason: HandOverEnd,
        end: RequestEnd,
        outcome: Outcome = Outcome.ABORTED,
    ) -> None:
        """Release a request and tell its decode worker, and its router unless it was told.

        The router was told if all pages are announced: then the decode worker goes on.
        """
        told = request.hand_over.is_announced
        send(self._context, request, request.hand_over.end(reason, end.error))
        self.release(request, outcome, None if told else end)

    def release(
        self, request: PrefillRequest, outcome: Outcome, end: RequestEnd | None = None
    ) -> None:
        """Free a request's memory and forget it; `end` is `None` if its router was told."""
        if request in self._waiting:
            self._waiting.remove(request)
        run = self.computing.remove(request)
        self.host_reads.take_back(request)
        if request.announced:
            self._agent.end_serving()
        timings = run.timings() if run else NO_TIMINGS
        fences = () if request.load is None else (request.load.pull,)
        self._context.release(request, outcome, end, timings=timings, fences=fences)


def _leads_for(leader: PrefillRequest, request: PrefillRequest) -> bool:
    """Whether a request may wait for a leader that may itself have to wait.

    A decode worker that lets the leader wait would let a request of the same prefix wait as well.
    Another decode worker may grant the request at once.
    """
    same = leader.decode_incarnation == request.decode_incarnation
    return same or not leader.hand_over.is_held
