"""Bounds on a request, from the model and the workers' pools, now and with expected workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.router.errors import ContextTooLong, Unavailable
from kvrelay.router.placement.demand import Demand
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one request."""

    vocab_size: int
    max_model_len: int
    """The most tokens of prompt and output together."""
    prefill_pool_tokens: int
    """The most tokens of one request, on the prefill worker with the most room.

    Prompt and output together must fit, since a retry brings its output as a part of the prompt.
    """
    decode_pool_tokens: int
    """The most tokens of one request, on the decode worker with the most room."""

    @classmethod
    def of(cls, endpoints: Sequence[WorkerInfo], *, decodes_alone: bool = False) -> RequestLimits:
        """Compute the bounds with these workers.

        A request runs on a pair or on an aggregated worker, so the bounds are of the kind that
        takes more.

        Args:
            endpoints: the workers.
            decodes_alone: whether decode workers compute prompts, too, and so need no others.

        Raises:
            Unavailable: there is neither a prefill and a decode worker nor an aggregated one.
        """
        pools = _largest_pools(endpoints)
        decode, prefill = pools.get(WorkerRole.DECODE, 0), pools.get(WorkerRole.PREFILL, 0)
        if decodes_alone:
            prefill = decode or prefill
        aggregated = pools.get(WorkerRole.AGGREGATED, 0)
        if aggregated > (decode if prefill else 0):
            prefill = decode = aggregated
        for pool, role in ((prefill, WorkerRole.PREFILL), (decode, WorkerRole.DECODE)):
            if not pool:
                raise Unavailable(f"there is no {role} worker")
        return cls(
            vocab_size=min(e.vocab_size for e in endpoints),
            max_model_len=min(e.max_model_len for e in endpoints),
            prefill_pool_tokens=prefill,
            decode_pool_tokens=decode,
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens of prompt and output together."""
        return min(self.max_model_len, self.decode_pool_tokens, self.prefill_pool_tokens)

    @property
    def reason(self) -> str:
        """A sentence that says why `most_tokens` is the limit."""
        is_the_models = self.max_model_len == self.most_tokens
        # A request that is resumed has its output computed again on a prefill worker.
        holder = "The model takes" if is_the_models else "A worker holds"
        option = "--max-model-len" if is_the_models else "--kv-memory"
        return f"{holder} no more ({option})"

    def check_prompt(
        self, field: str, tokens: int, *, is_exact: bool = True, output_tokens: int = 1
    ) -> None:
        """Raise `ContextTooLong` unless the output fits after the prompt.

        Args:
            field: the message's field that has the prompt.
            tokens: the prompt's length.
            is_exact: whether the prompt has exactly this length; else it has at least this.
            output_tokens: the fewest tokens of the output; 0: there is none.
        """
        if tokens + output_tokens > self.most_tokens:
            number = f"{tokens} tokens" if is_exact else f"{tokens} tokens or more"
            problem = f"The prompt has {number} and leaves no room for output. {self.reason}"
            raise ContextTooLong(field, self.most_tokens, problem)


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
    """The most tokens of one request on any worker of each role that has workers."""
    pools: dict[WorkerRole, int] = {}
    for one in workers:
        pools[one.role] = max(pools.get(one.role, 0), one.pool_tokens)
    return pools
