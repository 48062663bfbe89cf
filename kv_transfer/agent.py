"""NIXL behind one thread: the only code that talks to it.

The agent has no progress thread of NIXL's own, because that one spins a core
even when idle (its delay is fixed at 0 in the Python package). Instead this
thread makes progress: closely while it reads, often while peers are expected to
read from it, and now and then otherwise, so that no peer waits for ever.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvrelay.kv_transfer.checksums import LocalPage, PageHasher, PageSum
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.peer import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.scratch import constant_pages, landing_pages, make_scratch
from kvrelay.kv_transfer.spans import PoolLayout, SpanPairs, pair_spans
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.mem_cache.pool import KVPool

logger = logging.getLogger(__name__)

Operation = Literal["READ", "WRITE"]
"""What NIXL is to do with the peer's memory."""
READING_DELAY_S = (50e-6, 5e-3)
"""Between looks at reads in flight: at first, and for one that takes its time."""
SERVING_DELAY_S = 500e-6
"""Between progress calls while peers are expected to read from us."""
IDLE_DELAY_S = 50e-3
"""Between progress calls otherwise: a read may outlive the request that announced it."""


@dataclass(eq=False, slots=True)
class _Running:
    """A pull that was given to NIXL."""

    pull: Pull
    handle: object | None
    """None: NIXL has let go of it, though its bytes may still arrive."""
    begun: float
    on_end: Callable[[Pull], None]


class TransferAgent:
    """This worker's end of all KV transfers. Its methods may be called from any thread.

    The pools are registered once and stay registered until the process ends.

    Args:
        incarnation: this worker's; also the NIXL agent's name, so that a
            restarted worker is a new peer to everybody.
        pools: the memory that peers read from and that pulls write to; of one device.
        on_failure: called once, on the agent's thread, if it must give up.
    """

    def __init__(
        self, incarnation: str, pools: Sequence[KVPool], on_failure: Callable[[str], None]
    ) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.incarnation = incarnation
        self.layouts = tuple(map(_layout, pools))
        self.transports = os.environ.get("UCX_TLS", "all")  # UCX's own setting
        self.scratch = make_scratch(pools[0], incarnation)
        self._scratch_layout = _layout(self.scratch)
        self._agent = nixl_agent(incarnation, nixl_agent_config(enable_prog_thread=False))
        every = (*self.layouts, self._scratch_layout)
        regions = [(pool.address, pool.nbytes, pool.device_id, "") for pool in every]
        self._registration = self._agent.register_memory(regions, self.layouts[0].memory_type)
        self._metadata = bytes(self._agent.get_agent_metadata())
        self._peers: dict[str, PeerDescription] = {}
        self._running: list[_Running] = []
        self._failed: list[_Running] = []
        self._dead: set[str] = set()
        self._burials: list[tuple[str, Callable[[], None]]] = []
        self._serving = 0
        self._closed = False
        self._on_failure = on_failure
        self._hasher = PageHasher(pools, on_failure)
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def describe(self) -> PeerDescription:
        """What peers need in order to read this worker's pool."""
        digest = hashlib.sha256(self._metadata).digest()
        return PeerDescription(
            self.incarnation, self._metadata, digest, self.layouts, self._scratch_layout
        )

    def add_peer(self, peer: PeerDescription) -> None:
        """Make a peer's pool readable. Check the description first: its bytes are untrusted.

        One that is known is connected anew if transfers with it have failed.
        """
        self._orders.put(lambda: self._add_peer(peer))

    def confirm_death(self, incarnation: str, on_settled: Callable[[], None]) -> None:
        """The peer's process is known to be gone: what it had sent is all that can still arrive.

        Its pulls' fences pass once NIXL has reported the end of each and has
        let go of the peer; then `on_settled` is called, on the agent's thread.
        """
        self._orders.put(lambda: self._confirm_death(incarnation, on_settled))

    def pull(
        self,
        peer: str,
        local_pages: Sequence[Int64Array],
        remote_pages: Sequence[Int64Array],
        on_end: Callable[[Pull], None],
    ) -> Pull:
        """Order a read of a peer's pages, an array for each pool.

        `on_end` is called once, on the agent's thread.

        The caller keeps `local_pages` from any other use until the pull, taken
        as a fence, has passed.
        """
        pull = Pull(peer, tuple(local_pages), tuple(remote_pages))
        self._order(pull, on_end)
        return pull

    def _order(self, pull: Pull, on_end: Callable[[Pull], None]) -> None:
        self._orders.put(lambda: self._begin(pull, on_end))

    def probe(self, peer: str, operation: Operation, on_end: Callable[[Pull], None]) -> Pull:
        """Order a read of a peer's scratch pages into the own ones, or a write to them.

        In pieces of the pool's size. `on_end` is called once, on the agent's thread.
        """
        constant, landing = constant_pages(self.scratch), landing_pages(self.scratch)
        reads = operation == "READ"
        pull = Pull(peer, (landing if reads else constant,), (constant if reads else landing,))
        self._orders.put(lambda: self._begin(pull, on_end, operation, probes=True))
        return pull

    def answer(self, on_answer: Callable[[], object]) -> None:
        """Have `on_answer` called on the agent's thread, at its next pass: a sign that it lives."""
        self._answers.put(on_answer)

    def serve(self, change: int) -> None:
        """Tell that so many more (or fewer) requests may be read from by peers."""
        self._orders.put(lambda: self._change_serving(change))

    def hash_pages(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Order the checksums of pages here. `on_end` is called once, on another thread.

        The caller locks the pages, or ignores the answer once it does not.
        """
        self._hasher.order(pages, on_end)

    def close(self) -> None:
        """Stop the threads. The registration stays: a peer may still be reading."""
        self._hasher.close()
        self._orders.put(self._close)
        self._thread.join()

    # On the agent's own thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._obey()
                self._progress()
                self._answer()
        except Exception as error:
            logger.exception("the transfer agent gives up")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _obey(self) -> None:
        """Carry out what was ordered; sleep until an order comes, or progress is due."""
        try:
            order = self._orders.get(timeout=self._delay())
        except queue.Empty:
            return
        order()

    def _delay(self) -> float:
        if self._running:
            shortest, longest = READING_DELAY_S
            youngest = time.monotonic() - self._running[-1].begun
            return min(max(youngest / 50, shortest), longest)
        return SERVING_DELAY_S if self._serving else IDLE_DELAY_S

    def _progress(self) -> None:
        self._agent.get_new_notifs()
        for running in list(self._running):
            self._look_at(running, self._agent.check_xfer_state)
        for burial in list(self._burials):
            self._bury(*burial)

    def _answer(self) -> None:
        while not self._answers.empty():
            self._answers.get()()

    def _close(self) -> None:
        self._closed = True

    def _change_serving(self, change: int) -> None:
        self._serving += change

    def _add_peer(self, peer: PeerDescription) -> None:
        if peer.incarnation in self._dead:
            return
        if peer.incarnation in self._peers and not self._let_go_of_broken(peer.incarnation):
            return
        try:
            self._agent.add_remote_agent(peer.metadata)
        except Exception:
            # Pulls from it will fail by name; NIXL's exceptions have no common base.
            logger.exception("could not load the agent metadata of %s", peer.incarnation)
            return
        self._peers[peer.incarnation] = peer

    def _let_go_of_broken(self, incarnation: str) -> bool:
        """NIXL has nothing of a peer any more, if its last word was a failure.

        What failed still waits for the peer's death: it may be that bytes arrive.
        """
        failed = [entry for entry in self._failed_with(incarnation) if entry.handle is not None]
        if not failed or self._reads_from(incarnation):
            return False
        for entry in failed:
            self._agent.release_xfer_handle(entry.handle)
            entry.handle = None
        del self._peers[incarnation]
        self._agent.remove_remote_agent(incarnation)
        return True

    def _reads_from(self, incarnation: str) -> bool:
        return any(running.pull.peer == incarnation for running in self._running)

    def _failed_with(self, incarnation: str) -> list[_Running]:
        return [entry for entry in self._failed if entry.pull.peer == incarnation]

    def _confirm_death(self, incarnation: str, on_settled: Callable[[], None]) -> None:
        self._dead.add(incarnation)
        self._burials.append((incarnation, on_settled))

    def _bury(self, incarnation: str, on_settled: Callable[[], None]) -> None:
        """Let go of a dead peer once none of its reads is left in NIXL's hands."""
        if self._reads_from(incarnation):
            return
        self._burials.remove((incarnation, on_settled))
        failed = self._failed_with(incarnation)
        for entry in failed:
            if entry.handle is not None:
                self._agent.release_xfer_handle(entry.handle)
        if self._peers.pop(incarnation, None) is not None:
            self._agent.remove_remote_agent(incarnation)
        for entry in failed:
            self._failed.remove(entry)
            entry.pull.settle()
        on_settled()

    def _begin(
        self,
        pull: Pull,
        on_end: Callable[[Pull], None],
        operation: Operation = "READ",
        *,
        probes: bool = False,
    ) -> None:
        peer = self._peers.get(pull.peer)
        begun = time.monotonic()
        try:
            if peer is None:
                raise TransferError(f"worker {pull.peer} is not known to this one")
            pairs = self._pair(pull, peer, probes)
            handle = self._prepare(operation, pairs, peer)
        except Exception as error:
            pull.state, pull.error = PullState.FAILED, str(error)
            pull.settle()
            on_end(pull)
            return
        if probes:
            pull.backend = self._agent.query_xfer_backend(handle)
        pull.state, pull.nbytes = PullState.RUNNING, pairs.nbytes
        running = _Running(pull, handle, begun, on_end)
        self._running.append(running)
        self._look_at(running, self._agent.transfer)

    def _pair(self, pull: Pull, peer: PeerDescription, probes: bool) -> SpanPairs:
        here, there = self.layouts, peer.layouts
        if probes:
            here, there = (self._scratch_layout,), (peer.scratch,)
        pools = zip(here, pull.local_pages, there, pull.remote_pages, strict=True)
        return SpanPairs.joined([pair_spans(*pool) for pool in pools])

    def _prepare(self, operation: Operation, pairs: SpanPairs, peer: PeerDescription) -> object:
        def descriptors(addresses: Int64Array, layout: PoolLayout) -> object:
            device = np.full(len(addresses), layout.device_id, np.int64)
            rows = np.stack([addresses, pairs.lengths, device], axis=1).astype(np.uint64)
            return self._agent.get_xfer_descs(rows, layout.memory_type)

        return self._agent.initialize_xfer(
            operation,
            descriptors(pairs.local, self.layouts[0]),
            descriptors(pairs.remote, peer.layouts[0]),
            peer.incarnation,
            b"",
        )

    def _look_at(self, running: _Running, ask: Callable[[object], str]) -> None:
        try:
            state = ask(running.handle)
        except Exception as error:
            self._fail(running, f"{type(error).__name__}: {error}")
            return
        if state == "PROC":
            return
        if state != "DONE":
            self._fail(running, f"transfer ended as {state}")
            return
        self._running.remove(running)
        self._agent.release_xfer_handle(running.handle)
        running.pull.state = PullState.DONE
        running.pull.seconds = time.monotonic() - running.begun
        running.pull.settle()
        running.on_end(running.pull)

    def _fail(self, running: _Running, error: str) -> None:
        """Report a failure; the pull's pages stay fenced until the peer's death is confirmed."""
        self._running.remove(running)
        running.pull.state, running.pull.error = PullState.FAILED, error
        running.pull.seconds = time.monotonic() - running.begun
        logger.warning(
            "a transfer of %d pages with %s failed after %.1f s (%s): they wait for its end",
            running.pull.num_pages,
            running.pull.peer,
            running.pull.seconds,
            error,
        )
        self._failed.append(running)
        running.on_end(running.pull)


def _layout(pool: KVPool) -> PoolLayout:
    device = pool.data.device
    return PoolLayout(
        geometry=pool.geometry,
        total_pages=pool.total_pages,
        address=pool.address,
        device_id=device.index or 0,
        memory_type="VRAM" if device.type == "cuda" else "DRAM",
    )
