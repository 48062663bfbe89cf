"""The prospects of a request that must wait for workers that are expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.router.placement.demand import Demand
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class Prospects:
    """The largest pools by role, in tokens of one request."""

    ready: Mapping[WorkerRole, int]
    """The pools of workers that take requests."""
    coming: Mapping[WorkerRole, int]
    """The pools of workers that may take some later."""
    decodes_alone: bool
    """Whether decode workers compute prompts, too, and so need no others."""

    @classmethod
    def of(
        cls, ready: Iterable[WorkerInfo], coming: Iterable[WorkerInfo], *, decodes_alone: bool
    ) -> Prospects:
        """Find the largest pools of these workers."""
        return cls(_largest_pools(ready), _largest_pools(coming), decodes_alone)

    def promise(self, demand: Demand) -> bool:
        """Whether an expected worker could take a request, alone or with another one."""
        prefill = self._comes(WorkerRole.PREFILL, demand)
        decode = self._comes(WorkerRole.DECODE, demand)
        return (
            self._comes(WorkerRole.AGGREGATED, demand)
            or (decode and self.decodes_alone)
            or (prefill and (decode or _fits(self.ready, WorkerRole.DECODE, demand)))
            or (decode and _fits(self.ready, WorkerRole.PREFILL, demand))
        )

    def _comes(self, role: WorkerRole, demand: Demand) -> bool:
        return _fits(self.coming, role, demand)


def _fits(pools: Mapping[WorkerRole, int], role: WorkerRole, demand: Demand) -> bool:
    return pools.get(role, 0) >= demand.tokens_of(role)


def _largest_pools(workers: Iterable[WorkerInfo]) -> Mapping[WorkerRole, int]:
    pools: dict[WorkerRole, int] = {}
    for one in workers:
        pools[one.role] = max(pools.get(one.role, 0), one.pool_tokens)
    return pools
