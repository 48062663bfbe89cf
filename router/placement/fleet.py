"""All workers that discovery lists, each with a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.router.discovery import Discovery
from kvrelay.router.errors import Unavailable
from kvrelay.router.notifier import Notifier
from kvrelay.router.placement.choose import PlacementRules, Placer
from kvrelay.router.placement.chosen import Reason, Shortage
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.limits import Prospects, RequestLimits
from kvrelay.router.placement.ready_workers import ReadyWorkers
from kvrelay.router.placement.served_model import ServedModel
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
        rules: the settings of placement.
    """

    def __init__(
        self,
        discovery: Discovery,
        make_link: Callable[[WorkerInfo, Callable[[WorkerLink], None]], WorkerLink],
        prefixes: KnownPrefixes,
        rules: PlacementRules,
    ) -> None:
        self.prefixes = prefixes
        """The workers' known cached prefixes."""
        self._rules = rules
        self._discovery = discovery
        self._make_link = make_link
        self._links: dict[str, WorkerLink] = {}  # by incarnation, like the tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._awaited: tuple[WorkerInfo, ...] = ()
        self._known: list[WorkerInfo] = []
        self._limits: RequestLimits | None = None  # of `_known`; None: not computed
        self._prospects: Prospects | None = None  # None: not computed
        self._workers = ReadyWorkers(prefixes, lambda one: self._links[one].prompt_queue)
        self._placer = Placer(self._workers, rules)
        self.model = ServedModel()
        """The served model, and the workers that may serve it."""
        self.changes = Notifier()
        """Notified when the list of workers has changed, or which of them may be chosen."""

    @property
    def links(self) -> list[WorkerLink]:
        """The link to each listed worker."""
        return list(self._links.values())

    @property
    def ready(self) -> bool:
        """Whether a prefill and a decode worker, or one that needs no other, can take requests."""
        return self._placer.ready

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
                self._limits = RequestLimits.of(
                    self._known, decodes_alone=self._rules.decodes_alone
                )
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
                decodes_alone=self._rules.decodes_alone,
            )
        return self._prospects.promise(demand)

    def place(self, demand: Demand, deadline: float | None = None) -> Placement:
        """Choose the workers for an attempt; see `Placer.choose`.

        Args:
            demand: the attempt's.
            deadline: the call's, on the clock of `time.monotonic`, where the first token is to be
                in time for it; None: it need not be.

        Raises:
            DeadlineTooNear: no first token is expected in time.
            Unavailable: no ready workers can hold it. The error names the missing role, and why a
                decode worker reads from no prefill worker.
        """
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        chosen = self._placer.choose(demand, left)
        if isinstance(chosen, Shortage):
            raise self._unavailable(chosen)
        decode, prefill = self._links[chosen.decode.incarnation], None
        if chosen.prefill is not None:
            prefill = self._links[chosen.prefill.incarnation]
        return Placement(decode, prefill, chosen.reason, chosen.lent_tokens)

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
            self._workers.drop(link.endpoint.role, incarnation)
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
        """Rank a worker by its changed state; return whether others may be chosen now."""
        role = link.endpoint.role
        if _takes_requests(link):
            return self._workers.put(role, link.candidate)
        return self._workers.drop(role, link.endpoint.incarnation)

    def _close(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _takes_requests(link: WorkerLink) -> bool:
    return link.ready and not link.draining and not link.refusal
