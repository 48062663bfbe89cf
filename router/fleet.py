"""All workers that discovery lists, each with a link, and the choice among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from dataclasses import dataclass

from kvrelay.router.discovery import Discovery
from kvrelay.router.errors import Unavailable
from kvrelay.router.limits import Limits
from kvrelay.router.notifier import Notifier
from kvrelay.router.placement import Candidate, choose_aggregated, choose_decode, choose_prefill
from kvrelay.router.served_model import ServedModel
from kvrelay.router.worker_link import WorkerLink
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that serve one attempt."""

    decode: WorkerLink
    """Generates the output."""
    prefill: WorkerLink | None
    """Computes the input and hands it over; None: `decode` is an aggregated worker."""

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The links to all of them."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class Fleet:
    """Keeps one link to every incarnation that discovery lists.

    Args:
        discovery: lists the workers.
        make_link: makes a link, which calls its second argument when its readiness changes.
    """

    def __init__(
        self,
        discovery: Discovery,
        make_link: Callable[[WorkerInfo, Callable[[], None]], WorkerLink],
    ) -> None:
        self._discovery = discovery
        self._make_link = make_link
        self._links: dict[str, WorkerLink] = {}  # by incarnation, as are the tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._awaited: tuple[WorkerInfo, ...] = ()
        self.model = ServedModel()
        """Which workers may serve."""
        self.changes = Notifier()
        """Notified when the list of workers, or a link's readiness, has changed."""

    @property
    def links(self) -> list[WorkerLink]:
        """The link to each listed worker."""
        return list(self._links.values())

    @property
    def endpoints(self) -> list[WorkerInfo]:
        """The workers that are listed, ready or not, and have loaded the served model."""
        return [link.endpoint for link in self._links.values() if not link.refusal]

    @property
    def ready(self) -> bool:
        """A prefill and a decode worker, or an aggregated one, can take requests."""
        roles = {link.endpoint.role for link in self._links.values() if _takes_requests(link)}
        return roles >= {WorkerRole.PREFILL, WorkerRole.DECODE} or WorkerRole.AGGREGATED in roles

    @property
    def known(self) -> list[WorkerInfo]:
        """The workers that are listed, and as they were those that are being replaced."""
        return [*self.endpoints, *filter(self.model.is_loaded_by, self._awaited)]

    def limits(self) -> Limits:
        """Bounds on a request with the known workers.

        Raises:
            Unavailable: a role has none; says why it has none that serves.
        """
        try:
            return Limits.of(self.known)
        except Unavailable as error:
            raise Unavailable("; ".join([str(error), *self.model.refusals])) from error

    def expects(self, input_tokens: int, total_tokens: int) -> bool:
        """Whether workers that are on their way could take a request that `place` refuses now.

        On their way are those that are being replaced, and those that are listed and
        cannot be reached yet, or any more.
        """
        ready = [link.endpoint for link in self._links.values() if _takes_requests(link)]
        coming = [one.endpoint for one in self._links.values() if _may_yet_take_requests(one)]
        coming += filter(self.model.is_loaded_by, self._awaited)

        def fits(workers: list[WorkerInfo], role: WorkerRole, tokens: int) -> bool:
            return any(one.role is role and one.pool_tokens >= tokens for one in workers)

        prefill_comes = fits(coming, WorkerRole.PREFILL, input_tokens)
        decode_comes = fits(coming, WorkerRole.DECODE, total_tokens)
        return (
            fits(coming, WorkerRole.AGGREGATED, total_tokens)
            or (prefill_comes and decode_comes)
            or (prefill_comes and fits(ready, WorkerRole.DECODE, total_tokens))
            or (decode_comes and fits(ready, WorkerRole.PREFILL, input_tokens))
        )

    def place(
        self, input_tokens: int, total_tokens: int, suspects: Set[str] = frozenset()
    ) -> Placement:
        """Chooses the workers for an attempt.

        A prefill and a decode worker that reads from it, or an aggregated worker if no
        such pair is ready.

        Args:
            input_tokens: to be computed before the first output.
            total_tokens: with all the output that there can be.
            suspects: incarnations that are chosen only if there is no other.

        Raises:
            Unavailable: no ready workers can hold it; names the role that is missing, and
                why a decode worker reads from no prefill worker.
        """
        prefills = self._ready_links(WorkerRole.PREFILL, suspects)
        decodes = self._ready_links(WorkerRole.DECODE, suspects)
        alone = self._ready_links(WorkerRole.AGGREGATED, suspects)
        missing, refusal = WorkerRole.PREFILL, "; ".join(self.model.refusals)
        while (prefill := choose_prefill(prefills, input_tokens)) is not None:
            link = prefills.pop(prefill)
            peer = link.endpoint.incarnation
            willing = [one for one in decodes if not one.load.refusal_of(peer)]
            decode = choose_decode(willing, total_tokens)
            if decode is not None:
                return Placement(decodes[decode], link)
            missing = WorkerRole.DECODE
            refusals = filter(None, (one.load.refusal_of(peer) for one in decodes))
            refusal = next(refusals, refusal)
        aggregated = choose_aggregated(alone, total_tokens)
        if aggregated is not None:
            return Placement(alone[aggregated], None)
        if {endpoint.role for endpoint in self.known} == {WorkerRole.AGGREGATED}:
            missing = WorkerRole.AGGREGATED
        why = f": {refusal}" if refusal else ""
        raise Unavailable(f"no {missing} worker that could hold the request is ready{why}")

    async def run(self) -> None:
        """Follows discovery until cancelled; then every link is closed."""
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
            del self._links[incarnation]
            self._close(self._tasks.pop(incarnation))
        for incarnation in listed.keys() & self._links.keys():
            self._links[incarnation].endpoint = listed[incarnation]
        for incarnation in listed.keys() - self._links.keys():
            link = self._make_link(listed[incarnation], self.changes.notify_all)
            self._links[incarnation] = link
            self._tasks[incarnation] = asyncio.create_task(link.run(), name=link.endpoint.name)
        self.model.update(list(listed.values()), self._awaited)
        for incarnation, link in self._links.items():
            link.refusal = self.model.refusal_of(incarnation)
        self.changes.notify_all()

    def _close(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _ready_links(self, role: WorkerRole, suspects: Set[str]) -> dict[Candidate, WorkerLink]:
        return {
            link.candidate(suspect=incarnation in suspects): link
            for incarnation, link in self._links.items()
            if link.endpoint.role is role and _takes_requests(link)
        }


def _takes_requests(link: WorkerLink) -> bool:
    return link.ready and not link.draining and not link.refusal


def _may_yet_take_requests(link: WorkerLink) -> bool:
    return not link.refusal and not _takes_requests(link)
