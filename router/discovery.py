"""Which workers there are: the seam through which `deploy` tells the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvrelay.router.news import News


class WorkerRole(StrEnum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    """Computes prompts and hands their KV over."""
    DECODE = "decode"
    """Takes KV over and generates."""
    AGGREGATED = "aggregated"
    """Both, in one worker: the baseline."""


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One incarnation of a worker and where to reach it."""

    worker: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: WorkerRole
    incarnation: str
    """Fresh at every start: a restarted worker is another one."""
    address: str
    metrics_address: str
    pool_tokens: int
    """Tokens that its KV pool holds in all."""
    max_model_len: int
    vocab_size: int
    architecture: str
    eos_token_ids: tuple[int, ...]
    draining: bool = False
    """It is to get no more requests; those that nobody else can take wait for its successor.
    It is listed, alive or not, until that one is there."""


class Discovery(Protocol):
    """Knows the live workers. Used from the router's event loop only."""

    def endpoints(self) -> Sequence[WorkerEndpoint]:
        """The workers that are live now; must not block."""
        ...

    async def changed(self) -> None:
        """Returns after the next change; registers before it first suspends."""
        ...


class StaticDiscovery:
    """A list of workers that somebody replaces when it changes."""

    def __init__(self, endpoints: Sequence[WorkerEndpoint] = ()) -> None:
        self._endpoints = tuple(endpoints)
        self._news = News()

    def endpoints(self) -> Sequence[WorkerEndpoint]:
        """The list as last given."""
        return self._endpoints

    def replace(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Sets the list and tells whoever waits; call it on the event loop."""
        self._endpoints = tuple(endpoints)
        self._news.announce()

    async def changed(self) -> None:
        """Returns after the next `replace`."""
        await self._news.next()
