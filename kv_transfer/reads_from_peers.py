"""The reads of peers' bytes (and probes' writes), from their start until no byte can arrive.

Everything here runs on the transfer thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.kv_transfer.byte_runs import PoolLayout, SpanPairs, pair_spans
from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint, NixlTransfer, Operation
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Read:
    """A pull that was given to NIXL. Its state is the pull's."""

    pull: Pull
    endpoint: NixlEndpoint
    """The agent that runs it."""
    transfer: NixlTransfer
    started_at: float
    on_end: Callable[[Pull], None]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at


class ReadsFromPeers:
    """All reads whose bytes may still arrive: the running ones, and those that have failed.

    A read leaves when it has ended well, or when the NIXL agent that ran it is destroyed. The
    peer's death is not enough: its kernel still sends what the peer had written.

    Args:
        endpoints: the NIXL agents.
        pools: this worker's, which pulls write to.
    """

    def __init__(self, endpoints: Endpoints, pools: tuple[PoolLayout, ...]) -> None:
        self._endpoints = endpoints
        self._pools = pools
        self._reads: list[_Read] = []
        """The reads, in the order in which they were started."""
        self._on_fences_passed: Callable[[], None] | None = None

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        """Call `on_passed` whenever fences of failed reads have passed."""
        self._on_fences_passed = on_passed

    def start_pull(
        self, pull: Pull, peer: PeerDescription | None, on_end: Callable[[Pull], None]
    ) -> None:
        """Read a peer's pages into this worker's pools."""
        self._start(pull, on_end, lambda: self._prepare_pull(pull, peer))

    def start_probe(
        self,
        pull: Pull,
        peer: PeerDescription | None,
        operation: Operation,
        local: PoolLayout,
        on_end: Callable[[Pull], None],
    ) -> None:
        """Copy a peer's scratch pages to pages of `local`, or the other way round.

        If the pull is `from_host`, pages of the peer's host are read instead.
        """
        self._start(pull, on_end, lambda: self._prepare_probe(pull, peer, operation, local))

    def check_running(self) -> None:
        """Ask NIXL for the state of every running read, and call `on_end` of those that ended."""
        for read in self._running():
            self._update(read, read.transfer.check)

    def seconds_since_start(self) -> float | None:
        """Compute the age of the youngest running read. Returns `None` if none is running."""
        running = self._running()
        return running[-1].seconds if running else None

    def is_running(self, peer: str) -> bool:
        """Whether a read from a peer is running."""
        return any(read.pull.peer == peer for read in self._running())

    def runs_on(self, endpoint: NixlEndpoint, peer: str | None = None) -> bool:
        """Whether an agent has a running read, of one peer or of any."""
        return any(
            read.endpoint is endpoint and peer in (None, read.pull.peer) for read in self._running()
        )

    def is_broken(self, peer: str) -> bool:
        """Whether a read from a peer has failed on the current agent since `release_failed`."""
        return any(
            not read.transfer.is_released
            for read in self._failed(peer)
            if read.endpoint is self._endpoints.current
        )

    def is_fenced(self, peer: str, endpoint: NixlEndpoint | None = None) -> bool:
        """Whether bytes of a peer's failed reads may still arrive, on one agent or on any."""
        return any(endpoint in (None, read.endpoint) for read in self._failed(peer))

    def give_up(self, peer: str) -> None:
        """Fail a dead peer's running reads, because NIXL has not noticed the death."""
        for read in self._running():
            if read.pull.peer == peer:
                self._fail(read, "the peer's death is confirmed")

    def release_failed(self, peer: str) -> None:
        """Release a peer's failed reads in NIXL. Their bytes may still arrive."""
        for read in self._failed(peer):
            read.transfer.release()

    def release_on(self, endpoint: NixlEndpoint) -> None:
        """Release the failed reads of an agent in NIXL."""
        for read in self._failed_on(endpoint):
            read.transfer.release()

    def settle_on(self, endpoint: NixlEndpoint) -> None:
        """Let the fences of an agent's reads pass, because it is destroyed."""
        reads = self._failed_on(endpoint)
        for read in reads:
            self._reads.remove(read)
            read.pull.settle()
        if reads and self._on_fences_passed is not None:
            self._on_fences_passed()

    def _running(self) -> list[_Read]:
        return [read for read in self._reads if read.pull.state is PullState.RUNNING]

    def _failed(self, peer: str) -> list[_Read]:
        return [read for read in self._all_failed() if read.pull.peer == peer]

    def _failed_on(self, endpoint: NixlEndpoint) -> list[_Read]:
        return [read for read in self._all_failed() if read.endpoint is endpoint]

    def _all_failed(self) -> list[_Read]:
        return [read for read in self._reads if read.pull.state is PullState.FAILED]

    def _start(
        self,
        pull: Pull,
        on_end: Callable[[Pull], None],
        prepare: Callable[[], tuple[NixlTransfer, int]],
    ) -> None:
        pull.began = started_at = time.monotonic()
        try:
            transfer, nbytes = prepare()
        except Exception as error:  # NIXL's exceptions have no common base
            pull.refuse(str(error))
            on_end(pull)
            return
        pull.start(nbytes)
        read = _Read(pull, self._endpoints.current, transfer, started_at, on_end)
        self._reads.append(read)
        self._update(read, transfer.start)

    def _prepare_pull(self, pull: Pull, peer: PeerDescription | None) -> tuple[NixlTransfer, int]:
        """Prepare the transfer. Returns it and its bytes."""
        known = _known(peer, pull)
        layouts = known.host_layouts if pull.from_host else known.layouts
        pools = zip(self._pools, pull.local_pages, layouts, pull.remote_pages, strict=True)
        spans = SpanPairs.joined([pair_spans(*pool) for pool in pools])
        local, remote = self._pools[0], layouts[0]
        transfer = self._endpoints.current.prepare("READ", spans, local, remote, known.incarnation)
        return transfer, spans.nbytes

    def _prepare_probe(
        self, pull: Pull, peer: PeerDescription | None, operation: Operation, local: PoolLayout
    ) -> tuple[NixlTransfer, int]:
        known = _known(peer, pull)
        (here,), (there,) = pull.local_pages, pull.remote_pages
        remote = known.host_layouts[0] if pull.from_host else known.scratch
        spans = pair_spans(local, here, remote, there)
        transfer = self._endpoints.current.prepare(
            operation, spans, local, remote, known.incarnation
        )
        try:
            pull.backend = transfer.query_backend()
        except Exception:
            transfer.release()
            raise
        return transfer, spans.nbytes

    def _update(self, read: _Read, ask: Callable[[], str]) -> None:
        try:
            state = ask()
        except Exception as error:  # NIXL's exceptions have no common base
            self._fail(read, f"{type(error).__name__}: {error}")
            return
        if state == "DONE":
            self._finish(read)
        elif state != "PROC":
            self._fail(read, f"transfer ended as {state}")

    def _finish(self, read: _Read) -> None:
        self._reads.remove(read)
        read.transfer.release()
        read.pull.finish(read.seconds)
        read.on_end(read.pull)

    def _fail(self, read: _Read, error: str) -> None:
        """Report a failure; the pull's pages stay fenced, because bytes may still arrive."""
        read.pull.fail(error, read.seconds)
        logger.warning(
            "a transfer of %d pages with %s failed after %.1f s (%s); "
            "its pages stay in quarantine until the peer answers again, or its death is confirmed, "
            "and the NIXL agent that reads is replaced",
            read.pull.num_pages,
            read.pull.peer,
            read.pull.seconds,
            error,
        )
        read.on_end(read.pull)


def _known(peer: PeerDescription | None, pull: Pull) -> PeerDescription:
    if peer is None:
        raise TransferError(f"worker {pull.peer} is not known to this one")
    return peer
