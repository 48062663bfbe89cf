"""The NIXL agents of this worker: the one that starts reads, and those that it has replaced.

Everything but the constructor runs on the transfer thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription

logger = logging.getLogger(__name__)

REPLACE_EVERY_S = 10.0
"""The shortest time between two replacements: a new agent registers all memory and connects to
every peer anew."""


class Endpoints:
    """The NIXL agents, replaced after failures, so that no byte of a failed read still arrives.

    NIXL cannot cancel a read, and its error does not prove that no byte comes any more. But every
    byte of a READ is written on behalf of the local agent. So none comes once that agent is
    destroyed. A replaced agent is kept until none of its reads is running.

    An agent that peers may read from is never replaced, because they know its memory. So it starts
    no read: a worker that both reads and is read has two agents.

    Args:
        name: of the first agent; those that replace it have numbers.
        memory: the memory that transfers read and write; of one device.
        on_slow: a context for calls of NIXL that may take seconds.
        for_peers: memory of any kind that only peers read. Agents that peers do not know need not
            register it, which takes long if it is large.
    """

    def __init__(
        self,
        name: str,
        memory: Sequence[PoolLayout],
        on_slow: Callable[[], AbstractContextManager[None]] = nullcontext,
        for_peers: Sequence[PoolLayout] = (),
    ) -> None:
        self._on_slow = on_slow
        self._name = name
        self._known_to_peers = (*memory, *for_peers)
        self._for_peers = tuple(for_peers)
        self._memory = list(memory)
        self._num_made = 1
        self._replaced_at = -REPLACE_EVERY_S
        self.current = NixlEndpoint(name, self._known_to_peers)
        """The agent that starts reads."""
        self.retired: list[NixlEndpoint] = []
        """The agents that were replaced and are not destroyed yet."""
        self._readable: NixlEndpoint | None = None

    @property
    def readable(self) -> NixlEndpoint:
        """The agent that peers may know; from the first use on it is always the same one."""
        if self._readable is None:
            self._readable = self.current
        return self._readable

    def make_readable(self) -> None:
        """Make an agent that peers may know, if there is none.

        The current one is not used, even if no peer is connected to it: earlier failed reads may
        wait for its end.
        """
        if self._readable is None:
            self._readable = self._make(self._known_to_peers)

    def make_progress(self) -> None:
        """Make progress on the transfers of all agents, including reads by peers."""
        for endpoint in self._all():
            endpoint.make_progress()

    def _all(self) -> list[NixlEndpoint]:
        own = [self.current, *self.retired]
        if self._readable is not None and self._readable is not self.current:
            own.append(self._readable)
        return own

    def register(self, memory: PoolLayout) -> bool:
        """Register more memory that transfers of this worker may write to. Peers cannot read it.

        An agent is also connected to itself. If that connection has broken, it registers nothing
        any more, so it is replaced.

        Returns:
            Whether it is registered, and stays so. If not, its owner may free it.
        """
        self._memory.append(memory)
        try:
            with self._on_slow():
                self.current.register(memory)
            return True
        except Exception:  # NIXL's exceptions have no common base
            logger.warning("could not register more memory", exc_info=True)
        self._replaced_at = -REPLACE_EVERY_S
        is_registered = self.replace()
        if not is_registered:
            self._memory.remove(memory)
        return is_registered

    def disconnect(self, peer: str) -> None:
        """Disconnect all agents from a peer."""
        with self._on_slow():
            for endpoint in self._all():
                endpoint.disconnect(peer)

    def disconnect_current(self, peer: str) -> None:
        """Disconnect the agent that starts reads from a peer. Raises NIXL's exceptions."""
        with self._on_slow():
            self.current.disconnect(peer)

    def connect(self, peer: PeerDescription) -> None:
        """Connect the agent that starts reads to a peer. Raises NIXL's exceptions."""
        if self.current is self._readable:
            self.current = self._make(self._memory)
        with self._on_slow():
            self.current.connect(peer)

    def destroy(self, endpoint: NixlEndpoint) -> bool:
        """Destroy an agent without running reads. Returns whether it is gone; may raise."""
        with self._on_slow():
            return endpoint.destroy()

    def replace(self) -> bool:
        """Make a new agent for the reads that start from now on; it knows no peer yet.

        Returns:
            Whether it was made. It is not if the last one is young, or peers may know it.
        """
        now = time.monotonic()
        if self.current is self._readable or now - self._replaced_at < REPLACE_EVERY_S:
            return False
        self._replaced_at = now
        try:
            may_be_read = self._for_peers if self._readable is None else ()
            new = self._make((*self._memory, *may_be_read))
        except Exception:  # NIXL's exceptions have no common base
            logger.exception("could not make a new NIXL agent")
            return False
        self.retired.append(self.current)
        self.current = new
        seconds = time.monotonic() - now
        logger.warning("reads have failed: a new NIXL agent was made in %.2f s", seconds)
        return True

    def _make(self, memory: Sequence[PoolLayout]) -> NixlEndpoint:
        """Make another agent of this worker. Raises NIXL's exceptions."""
        with self._on_slow():
            new = NixlEndpoint(f"{self._name}/{self._num_made}", memory)
        self._num_made += 1
        return new
