"""The workers that this one reads from: connecting to them, and proving that no byte still comes.

Everything here happens on the transfer thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.reads_from_peers import ReadsFromPeers
from kvrelay.kv_transfer.second_tries import SecondTries
from kvrelay.kv_transfer.transfers import MOST_DEAD

logger = logging.getLogger(__name__)

ENDS_BY_ITSELF_S = 5.0
"""A dead peer's running reads are given up after that: NIXL has failed them long before, if it
was told of the end. It is not where the peer's host is frozen, or cut off."""


class Peers:
    """Connects NIXL to peers, and disconnects it from those that are broken or dead.

    Args:
        endpoints: NIXL.
        reads: those from these peers.
    """

    def __init__(self, endpoints: Endpoints, reads: ReadsFromPeers) -> None:
        self._endpoints = endpoints
        self._reads = reads
        self._known: dict[str, PeerDescription] = {}
        """By incarnation."""
        self._dead: deque[str] = deque(maxlen=MOST_DEAD)
        """Incarnations that are not connected again, by a handshake that comes too late."""
        self._awaited_deaths: dict[str, float] = {}
        """Dead peers of which NIXL may still have reads, or connections to them, and since when."""
        self._tries = SecondTries()
        """To let go of dead peers and of replaced agents."""
        self._needs_new_agent = False
        """Reads have failed, of a peer that is dead or answers again: the agent has to go."""

    def find(self, incarnation: str) -> PeerDescription | None:
        """A peer's description; `None` if NIXL is not connected to it."""
        peer = self._known.get(incarnation)
        if peer is None or not self._connect(peer):
            return None
        return peer

    def add(self, peer: PeerDescription) -> None:
        """Connect to a peer; anew, if it is connected and reads from it have failed.

        A failure is logged: reads from the peer will then fail, naming it.
        """
        if peer.incarnation in self._dead:
            return
        if self._reads.is_broken(peer.incarnation):
            self._needs_new_agent = True
            if not self._replace_agent():
                self._disconnect_idle()
        if self._connect(peer):
            self._known[peer.incarnation] = peer

    def reconnect(self, incarnation: str) -> None:
        """Connect anew to a peer that was added, if reads from it have failed."""
        peer = self._known.get(incarnation)
        if peer is not None:
            self.add(peer)

    def confirm_death(self, incarnation: str) -> None:
        """Start no read from a peer any more, and close the connections that failed reads used."""
        self._dead.append(incarnation)
        self._known.pop(incarnation, None)
        self._awaited_deaths.setdefault(incarnation, time.monotonic())

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        return not (self._awaited_deaths or self._needs_new_agent or self._endpoints.retired)

    def settle(self) -> None:
        """Let the fences pass of failed reads that no byte can come from any more."""
        self._settle_deaths()
        if self._needs_new_agent:
            self._replace_agent()
        for endpoint in list(self._endpoints.retired):
            if not self._reads.runs_on(endpoint):
                self._settle_retired(endpoint)

    def _settle_deaths(self) -> None:
        """Forget dead peers, once no byte of a failed read can arrive.

        To forget a peer closes no socket, and bytes still arrive afterwards (NIXL 1.5.1, by TCP).
        So where reads from it have failed, the agents that ran them have to go.
        """
        for incarnation, since in list(self._awaited_deaths.items()):
            if self._reads.is_running(incarnation):
                if time.monotonic() - since < ENDS_BY_ITSELF_S:
                    continue
                self._reads.give_up(incarnation)
            if self._reads.is_fenced(incarnation):
                if self._reads.is_fenced(incarnation, self._endpoints.current):
                    self._needs_new_agent = True
            elif self._tries.run(incarnation, f"NIXL keeps dead {incarnation}", self._forget):
                del self._awaited_deaths[incarnation]

    def _forget(self, incarnation: str) -> bool:
        """Remove a peer of which no read is left. May raise NIXL's exceptions."""
        self._endpoints.disconnect(incarnation)
        return True

    def _connect(self, peer: PeerDescription) -> bool:
        """Let the current agent know a peer; returns whether it does."""
        if not self._endpoints.current.knows(peer.incarnation):
            try:
                self._endpoints.connect(peer)
            except Exception:  # NIXL's exceptions have no common base
                logger.exception("could not load the agent metadata of %s", peer.incarnation)
                return False
        return True

    def _replace_agent(self) -> bool:
        """Replace the agent, if that may be; its failed reads end with it."""
        if not self._endpoints.replace():
            return False
        self._needs_new_agent = False
        return True

    def _disconnect_idle(self) -> None:
        """Disconnect the agent from all peers that it reads nothing from; they connect when used.

        What broke one connection has often broken others, which shows only when they are used.
        Failed reads stay fenced: their bytes may still arrive.
        """
        endpoint = self._endpoints.current
        for incarnation in endpoint.connected:
            if self._reads.runs_on(endpoint, incarnation):
                continue
            try:
                self._reads.release_failed(incarnation)
                self._endpoints.disconnect_current(incarnation)
            except Exception:  # it may be dead by now, or hold on to a transfer
                logger.exception("could not disconnect from %s", incarnation)

    def _settle_retired(self, endpoint: NixlEndpoint) -> None:
        """Destroy a replaced agent that has no running read, and let its fences pass."""
        if self._tries.run(endpoint, "a NIXL agent that was replaced stays", self._destroy):
            self._endpoints.retired.remove(endpoint)
            self._reads.settle_on(endpoint)

    def _destroy(self, endpoint: NixlEndpoint) -> bool:
        """Whether an agent that has no running read is gone. May raise NIXL's exceptions."""
        self._reads.release_on(endpoint)
        return self._endpoints.destroy(endpoint)
