"""A request as a worker sees it, from its submission to its last output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.engine.outputs import RequestKey, RouterLink
from kvrelay.engine.stop import StopConditions
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.model_runner.sampling_params import SamplingParams


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One attempt at a request on this worker. Only the engine thread touches it."""

    key: RequestKey
    link: RouterLink
    """Where its outputs go."""
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stops: StopConditions
    priority: int = 0
    """Lower runs earlier."""
    arrived: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list)
    lease: Lease | None = None
    last_step: int = 0
    """The last forward that reads this request's page table."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def held(self) -> Lease:
        """Its lease, where it surely has one."""
        assert self.lease is not None, f"{self.key} holds no memory"
        return self.lease

    @property
    def has_ended(self) -> bool:
        """Whether its memory is given back, though a forward may still compute it."""
        return self.lease is not None and self.lease.state is LeaseState.RELEASED

    @property
    def turn(self) -> tuple[int, float]:
        """Sorts requests in the order in which they are to run."""
        return (self.priority, self.arrived)

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at the absolute positions ``[start, end)``."""
        prompt = len(self.prompt_ids)
        tokens = list(self.prompt_ids[start:end])
        if end > prompt:
            tokens += self.output_ids[max(start - prompt, 0) : end - prompt]
        return tokens
