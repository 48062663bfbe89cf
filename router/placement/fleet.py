"""All workers that discovery lists, each with a link, and the choice among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrelay.router.discovery import Discovery
from kvrelay.router.errors import Unavailable
from kvrelay.router.notifier import Notifier
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.placement.local_prompts import Reason, Side, decide
from kvrelay.router.placement.pairing import Placer, Shortage
from kvrelay.router.placement.served_model import ServedModel
from kvrelay.router.placement.starting_workers import Prospects
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that serve one attempt."""

    decode: WorkerLink
    """The worker that generates the output."""
    prefill: WorkerLink | None
    """The worker that computes the input and hands it over; None: `decode` computes it, too."""
    reason: Reason = Reason.NO_CHOICE
    """Why this worker computes the input."""
    lent_tokens: int = 0
    """Tokens of the input that `prefill` has, or is expected to read from `decode`."""

    @property
    def computes_prompt(self) -> WorkerLink:
        """The worker that computes the input."""
        return self.prefill or self.decode

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The links to all workers of the placement."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class Fleet:
    """The links to all incarnations that discovery lists, one each.

    Args:
        discovery: lists the workers.
        make_link: makes a link, which calls its second argument with itself when its readiness or
            its load has changed.
        prefixes: what is known of the workers' cached prefixes.
        decodes_alone: whether decode workers compute prompts, too, where that seems best.
        itl_target: seconds that a decode worker's step with prompts may take; None: its learnt
            bound.
    """

    def __init__(
        self,
        discovery: Discovery,
        make_link: Callable[[WorkerInfo, Callable[[WorkerLink], None]], WorkerLink],
        prefixes: KnownPrefixes,
        *,
        decodes_alone: bool = False,
        itl_target: float | None = None,
    ) -> None:
        self.prefixes = prefixes
        """The workers' known cached prefixes."""
        self._decodes_alone = decodes_alone
        self._itl_target = itl_target
        self._discovery = discovery
        self._make_link = make_link
        self._links: dict[str, WorkerLink] = {}  # by incarnation, like the tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._awaited: tuple[WorkerInfo, ...] = ()
        self._known: list[WorkerInfo] = []
        self._limits: RequestLimits | None = None  # of `_known`; None: not computed
        self._prospects: Prospects | None = None  # None: not computed
        self._placer = Placer(prefixes, decodes_alone=decodes_alone)
        self.model = ServedModel()
        """The served model, and the workers that may serve it."""
        self.changes = Notifier()
        """Notified when the list of workers has changed, or which of them may be chosen."""

    @property
    def links(self) -> list[WorkerLink]:
        """The link to each listed worker."""
        return list(self._links.values())

    def prompt_links_for(self, demand: Demand, most: int) -> list[WorkerLink]:
        """The links to the best workers that can take a request's prompt to compute now.

        Decode workers are among them only while idle: else they compute prompts in small chunks, if
        at all.

        Args:
            demand: what the request needs.
            most: the most workers of each role.
        """
        return [
            self._links[one.incarnation]
            for role, one in self._placer.best_to_compute(demand, most)
            if role is not WorkerRole.DECODE or not one.num_requests
        ]

    @property
    def ready(self) -> bool:
        """Whether a prefill and a decode worker, or one that needs no other, can take requests."""
        return self._placer.pairs_ready or self._placer.one_alone_ready

    @property
    def known(self) -> Sequence[WorkerInfo]:
        """The workers that have loaded the served model.

        They are the listed ones, ready or not, and the former ones that are being replaced.
        """
        return self._known

    def forget_session(self, incarnation: str, name: str) -> None:
        """Tell a worker, if it is still listed, to keep nothing of a session."""
        link = self._links.get(incarnation)
        if link is not None:
            link.forget_session(name)

    def limits(self) -> RequestLimits:
        """Bounds on a request, by the known workers.

        Raises:
            Unavailable: a role has no worker; the error says why none serves.
        """
        if self._limits is None:
            try:
                self._limits = RequestLimits.of(self._known, decodes_alone=self._decodes_alone)
            except Unavailable as error:
                raise Unavailable("; ".join([str(error), *self.model.refusals])) from error
        return self._limits

    def expects(self, demand: Demand) -> bool:
        """Whether expected workers could take a request that `place` refuses now.

        Expected are the workers that are being replaced, and listed ones that cannot be reached
        yet, or any more.
        """
        if self._prospects is None:
            links = [link for link in self._links.values() if not link.refusal]
            self._prospects = Prospects.of(
                [link.endpoint for link in links if _takes_requests(link)],
                [
                    *[link.endpoint for link in links if not _takes_requests(link)],
                    *filter(self.model.is_loaded_by, self._awaited),
                ],
                decodes_alone=self._decodes_alone,
            )
        return self._prospects.promise(demand)

    def place(self, demand: Demand) -> Placement:
        """Choose the workers for an attempt; see `Placer.choose`.

        Raises:
            Unavailable: no ready workers can hold it. The error names the missing role, and why a
                decode worker reads from no prefill worker.
        """
        chosen = self._placer.choose(demand)
        if isinstance(chosen, Shortage):
            raise self._unavailable(chosen)
        decode, prefill = self._links[chosen.decode.incarnation], chosen.prefill
        if prefill is None:
            reason = Reason.SOONER if demand.computed_by else Reason.NO_CHOICE
            return Placement(decode, None, reason)
        return self._decide(demand, self._links[prefill.incarnation], decode)

    def _decide(self, demand: Demand, prefill: WorkerLink, decode: WorkerLink) -> Placement:
        """Choose the worker of a pair that computes the input."""
        if not self._decodes_alone:
            return Placement(decode, prefill, Reason.MODE)
        if demand.computed_by:
            return Placement(decode, prefill, Reason.SOONER)
        if (avoided := self._avoided(demand, prefill, decode)) is not None:
            by_decode = avoided is WorkerRole.PREFILL
            return Placement(decode, None if by_decode else prefill, Reason.SUSPECT)
        borrower = _lent(self._side(prefill, demand), prefill, decode, demand)
        here = self._side(decode, demand)
        decision = decide(demand.input_tokens, borrower, here, self._itl_target)
        computes = None if decision.by_decode else prefill
        return Placement(decode, computes, decision.reason, decision.lent_tokens)

    @staticmethod
    def _avoided(demand: Demand, prefill: WorkerLink, decode: WorkerLink) -> WorkerRole | None:
        """The role in a pair that must not compute the input, after earlier failures."""
        suspects = [one for one in (prefill, decode) if one.endpoint.incarnation in demand.suspects]
        if len(suspects) == 1:
            return suspects[0].endpoint.role
        return None if demand.failed_by is WorkerRole.AGGREGATED else demand.failed_by

    def _side(self, link: WorkerLink, demand: Demand) -> Side:
        cached = 0
        if marks := demand.reusable_on(link.endpoint.role):
            cached = self.prefixes.hit_tokens(link.endpoint.incarnation, marks)
        if link.endpoint.role not in demand.in_full_on:
            cached = max(cached, demand.kept_on(link.endpoint.incarnation))
        return Side(link.prompt_queue, cached, link.candidate.num_requests)

    def _unavailable(self, shortage: Shortage) -> Unavailable:
        missing = shortage.missing
        if {endpoint.role for endpoint in self._known} == {WorkerRole.AGGREGATED}:
            missing = WorkerRole.AGGREGATED
        refusal = shortage.refusal or "; ".join(self.model.refusals)
        why = f": {refusal}" if refusal else ""
        return Unavailable(f"no {missing} worker that could hold the request is ready{why}")

    async def run(self) -> None:
        """Follow discovery until cancelled; then close every link."""
        try:
            while True:
                self._awaited = tuple(self._discovery.awaited())
                self._update_links({e.incarnation: e for e in self._discovery.endpoints()})
                await self._discovery.changed()
        finally:
            self._update_links({})
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _update_links(self, listed: dict[str, WorkerInfo]) -> None:
        for incarnation in self._links.keys() - listed.keys():
            link = self._links.pop(incarnation)
            self._placer.drop(link.endpoint.role, incarnation)
            self._close(self._tasks.pop(incarnation))
        for incarnation in listed.keys() & self._links.keys():
            self._links[incarnation].endpoint = listed[incarnation]
        for incarnation in listed.keys() - self._links.keys():
            link = self._make_link(listed[incarnation], self._link_changed)
            self._links[incarnation] = link
            self._tasks[incarnation] = asyncio.create_task(link.run(), name=link.endpoint.name)
        self.model.update(list(listed.values()), self._awaited)
        for incarnation, link in self._links.items():
            link.refusal = self.model.refusal_of(incarnation)
            self._rank(link)
        self._know([link.endpoint for link in self._links.values() if not link.refusal])
        self.changes.notify_all()

    def _know(self, endpoints: list[WorkerInfo]) -> None:
        self._known = [*endpoints, *filter(self.model.is_loaded_by, self._awaited)]
        self._limits = self._prospects = None

    def _link_changed(self, link: WorkerLink) -> None:
        # The link of a worker that is listed no more says once that its stream has ended.
        if link.endpoint.incarnation in self._links and self._rank(link):
            self._prospects = None
            self.changes.notify_all()

    def _rank(self, link: WorkerLink) -> bool:
        """Pass a worker's changed state to the placer; return what the placer returns."""
        role = link.endpoint.role
        if _takes_requests(link):
            return self._placer.put(role, link.candidate)
        return self._placer.drop(role, link.endpoint.incarnation)

    def _close(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _takes_requests(link: WorkerLink) -> bool:
    return link.ready and not link.draining and not link.refusal


def _lent(side: Side, prefill: WorkerLink, decode: WorkerLink, demand: Demand) -> Side:
    """The prefill side, which may read the session's KV from the decode worker."""
    kept, incarnation = demand.kept_on(decode.endpoint.incarnation), prefill.endpoint.incarnation
    if not kept:
        return side
    speeds = {one.incarnation: one.lent_tokens_per_second for one in decode.load.peers}
    speed = speeds.get(incarnation, 0.0)
    if not speed or prefill.endpoint.role in demand.in_full_on:
        return side
    return replace(side, lent_tokens=kept, lent_seconds=(kept - side.cached_tokens) / speed)
