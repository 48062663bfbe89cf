"""Reads of pages that end when the simulation says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.wire.agent_description import AgentDescription, PoolDescription, PoolGeometry
from kvrelay.wire.hand_over import PageSum
from kvrelay.wire.model_digest import NO_MODEL

POOL = PoolDescription(0, 0, PoolGeometry(1, 1, 1, "float32", 1, "page_first"))


class SimAgent:
    """Reads pages when the simulation says so."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.page_bytes = 1
        self.serving = 0
        self.ordered: list[tuple[Pull, Callable[[Pull], None]]] = []
        self.to_hash: list[tuple[Sequence[LocalPage], Callable[[tuple[PageSum, ...]], None]]] = []

    def hash_pages(self, pages: Any, on_end: Any) -> None:
        self.to_hash.append((pages, on_end))

    def begin_serving(self) -> None:
        self.serving += 1

    def end_serving(self) -> None:
        self.serving -= 1
        assert self.serving >= 0

    def pull(
        self,
        peer: str,
        local_pages: Any,
        remote_pages: Any,
        on_end: Callable[[Pull], None],
        *,
        from_host: bool = False,
    ) -> Pull:
        local, remote = tuple(local_pages), tuple(remote_pages)
        pull = Pull(peer, local, remote, PullState.RUNNING, from_host)
        self.ordered.append((pull, on_end))
        return pull

    def make_readable(self, on_ready: Callable[[AgentDescription], None]) -> None:
        on_ready(AgentDescription(self.incarnation, b"", b"", 0, "DRAM", (), POOL, NO_MODEL))

    def meet(self, incarnation: str, plain: AgentDescription) -> None:
        assert plain.incarnation == incarnation

    def reconnect(self, incarnation: str) -> None:
        """Fences of failed reads pass when the simulation says so."""

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        self.on_fences_passed = on_passed

    def confirm_death(self, incarnation: str) -> None:
        for pull, on_end in [entry for entry in self.ordered if entry[0].peer == incarnation]:
            self.ordered.remove((pull, on_end))
            pull.state = PullState.FAILED
            pull.settle()
            on_end(pull)
        self.on_fences_passed()
