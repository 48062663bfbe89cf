"""The workers that this one reads from, and the confirmation of their deaths.

Everything here happens on the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.reads_from_peers import ReadsFromPeers

logger = logging.getLogger(__name__)


class Peers:
    """Connects NIXL to peers, and disconnects it from those that are broken or dead.

    Args:
        endpoint: NIXL.
        reads: those from these peers.
    """

    def __init__(self, endpoint: NixlEndpoint, reads: ReadsFromPeers) -> None:
        self._endpoint = endpoint
        self._reads = reads
        self._connected: dict[str, PeerDescription] = {}
        """What NIXL knows, by incarnation: of a dead peer until its last read has ended."""
        self._dead: set[str] = set()
        """Incarnations that are never connected again."""
        self._awaited_deaths: list[tuple[str, Callable[[], None]]] = []
        """Dead peers of which NIXL may still have reads, and what to call when it has none."""

    def find(self, incarnation: str) -> PeerDescription | None:
        """A connected peer's description; `None` if it is not connected."""
        return self._connected.get(incarnation)

    def add(self, peer: PeerDescription) -> None:
        """Connect to a peer; anew, if it is connected and reads from it have failed.

        A failure is logged: reads from the peer will then fail, naming it.
        """
        if peer.incarnation in self._dead:
            return
        if peer.incarnation in self._connected and not self._disconnect_broken(peer.incarnation):
            return
        try:
            self._endpoint.connect(peer)
        except Exception:  # NIXL's exceptions have no common base
            logger.exception("could not load the agent metadata of %s", peer.incarnation)
            return
        self._connected[peer.incarnation] = peer

    def confirm_death(self, incarnation: str, on_fences_passed: Callable[[], None]) -> None:
        """Connect to a peer no more, and disconnect when none of its reads is running."""
        self._dead.add(incarnation)
        self._awaited_deaths.append((incarnation, on_fences_passed))

    def settle_deaths(self) -> None:
        """Let the fences pass of dead peers of which NIXL has no running read any more."""
        for awaited in list(self._awaited_deaths):
            incarnation, on_fences_passed = awaited
            if self._reads.is_running(incarnation):
                continue
            self._awaited_deaths.remove(awaited)
            self._reads.release_failed(incarnation)
            if self._connected.pop(incarnation, None) is not None:
                self._endpoint.disconnect(incarnation)
            self._reads.settle_failed(incarnation)
            on_fences_passed()

    def _disconnect_broken(self, incarnation: str) -> bool:
        """Disconnect from a peer if reads from it have failed and none is running.

        The failed reads stay fenced until the peer's death: their bytes may still arrive.

        Returns:
            whether the peer is disconnected.
        """
        if not self._reads.is_broken(incarnation) or self._reads.is_running(incarnation):
            return False
        try:
            self._reads.release_failed(incarnation)
            self._endpoint.disconnect(incarnation)
        except Exception:  # it may be dead by now, or hold on to a transfer
            logger.exception("could not disconnect from %s", incarnation)
            return False
        del self._connected[incarnation]
        return True
