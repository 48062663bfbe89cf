"""Reads of pages that end when the simulation says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.wire.hand_over import PageSum


class SimAgent:
    """Reads pages when the simulation says so."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
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

    def pull(self, peer: str, local: Any, remote: Any, on_end: Callable[[Pull], None]) -> Pull:
        pull = Pull(peer, tuple(local), tuple(remote), PullState.RUNNING)
        self.ordered.append((pull, on_end))
        return pull

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        self.on_fences_passed = on_passed

    def confirm_death(self, incarnation: str) -> None:
        for pull, on_end in [entry for entry in self.ordered if entry[0].peer == incarnation]:
            self.ordered.remove((pull, on_end))
            pull.state = PullState.FAILED
            pull.settle()
            on_end(pull)
        self.on_fences_passed()
