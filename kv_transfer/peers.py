"""The workers that this one reads from: connections, and the proof that no byte still comes.

Everything here runs on the transfer thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.reads_from_peers import ReadsFromPeers
from kvrelay.kv_transfer.transfers import MOST_DEAD

logger = logging.getLogger(__name__)

TRY_AGAIN_S = 1.0
"""Seconds between two tries; a transfer thread's passes are much shorter."""

SubjectT = TypeVar("SubjectT", bound=Hashable)

ENDS_BY_ITSELF_S = 5.0
"""Seconds after which a dead peer's running reads are given up. NIXL has usually failed them long
before. It has not if the peer's host is frozen, or cut off."""


class Peers:
    """The connections of NIXL to peers; broken and dead peers are disconnected.

    Args:
        endpoints: the NIXL agents.
        reads: those from these peers.
    """

    def __init__(self, endpoints: Endpoints, reads: ReadsFromPeers) -> None:
        self._endpoints = endpoints
        self._reads = reads
        self._known: dict[str, PeerDescription] = {}
        """The descriptions of peers, by incarnation."""
        self._dead: deque[str] = deque(maxlen=MOST_DEAD)
        """Incarnations of dead peers, to which a late handshake must not connect again."""
        self._awaited_deaths: dict[str, float] = {}
        """Dead peers to which NIXL may still have reads or connections, and since when they are
        dead."""
        self._tries = SecondTries()
        """The tries to release dead peers and replaced agents."""
        self._needs_new_agent = False
        """Whether the agent must be replaced: reads of a peer that is dead, or answers again, have
        failed."""

    def find(self, incarnation: str) -> PeerDescription | None:
        """Find a peer's description; `None` if it is unknown or NIXL cannot connect to it."""
        peer = self._known.get(incarnation)
        if peer is None or not self._connect(peer):
            return None
        return peer

    def add(self, peer: PeerDescription) -> None:
        """Connect to a peer; anew, if it is connected and reads from it have failed.

        A failure is logged. Reads from the peer will then fail with its name.
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
        """Start no more reads from a peer, and close the connections that failed reads used."""
        self._dead.append(incarnation)
        self._known.pop(incarnation, None)
        self._awaited_deaths.setdefault(incarnation, time.monotonic())

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        return not (self._awaited_deaths or self._needs_new_agent or self._endpoints.retired)

    def settle(self) -> None:
        """Let fences of failed reads pass once no byte of them can come any more."""
        self._settle_deaths()
        if self._needs_new_agent:
            self._replace_agent()
        for endpoint in list(self._endpoints.retired):
            if not self._reads.runs_on(endpoint):
                self._settle_retired(endpoint)

    def _settle_deaths(self) -> None:
        """Forget dead peers, once no byte of a failed read can arrive.

        Removing a peer closes no socket, and bytes still arrive afterwards (NIXL 1.5.1, by TCP). So
        if reads from it have failed, the agents that ran them are destroyed.
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
        """Disconnect from a peer that has no read left. May raise NIXL's exceptions."""
        self._endpoints.disconnect(incarnation)
        return True

    def _connect(self, peer: PeerDescription) -> bool:
        """Connect the current agent to a peer. Returns whether it is connected."""
        if not self._endpoints.current.knows(peer.incarnation):
            try:
                self._endpoints.connect(peer)
            except Exception:  # NIXL's exceptions have no common base
                logger.exception("could not load the agent metadata of %s", peer.incarnation)
                return False
        return True

    def _replace_agent(self) -> bool:
        """Replace the agent, if that is allowed; its failed reads end with it."""
        if not self._endpoints.replace():
            return False
        self._needs_new_agent = False
        return True

    def _disconnect_idle(self) -> None:
        """Disconnect the agent from all peers that it reads nothing from; they connect when used.

        The cause that broke one connection has often broken others, which shows only when they are
        used. Failed reads stay fenced: their bytes may still arrive.
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
        """Destroy an agent without running reads. Returns whether it is gone; may raise."""
        self._reads.release_on(endpoint)
        return self._endpoints.destroy(endpoint)


class SecondTries:
    """The pace of tries that may fail, for each of their subjects. Used on one thread."""

    def __init__(self) -> None:
        self._failed_at: dict[Hashable, float] = {}

    def run(self, subject: SubjectT, complaint: str, action: Callable[[SubjectT], bool]) -> bool:
        """Call `action` with `subject`, unless it has failed within the last `TRY_AGAIN_S`.

        Args:
            subject: the object of the action.
            complaint: logged when the action fails for the first time.
            action: has failed if it returns `False` or raises.

        Returns:
            Whether it was called and has not failed.
        """
        failed_at = self._failed_at.get(subject)
        if failed_at is not None and time.monotonic() - failed_at < TRY_AGAIN_S:
            return False
        level = logging.ERROR if failed_at is None else logging.DEBUG
        try:
            if action(subject):
                self._failed_at.pop(subject, None)
                return True
            logger.log(level, "%s; it is tried again", complaint)
        except Exception:  # NIXL's exceptions have no common base
            logger.log(level, "%s; it is tried again", complaint, exc_info=True)
        self._failed_at[subject] = time.monotonic()
        return False
