"""The transfer thread: runs the KV transfers that other threads order, and makes NIXL's progress.

It makes progress very often while it reads, often while peers are expected to read from this
worker, and now and then otherwise. So no peer waits forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvrelay.device.cuda_streams import use_device
from kvrelay.device.thread_end import CLOSE_SECONDS, ended_within, seconds_until
from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.checksums import LocalPage, PageHasher
from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.nixl_endpoint import Operation
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.peers import Peers
from kvrelay.kv_transfer.pull import Pull
from kvrelay.kv_transfer.reads_from_peers import ReadsFromPeers
from kvrelay.kv_transfer.scratch_pages import (
    constant_pages,
    landing_pages,
    make_landing,
    make_scratch,
)
from kvrelay.kv_transfer.ucx_settings import describe_transports
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.hand_over import PageSum
from kvrelay.wire.model_digest import NO_MODEL, ModelDigest

logger = logging.getLogger(__name__)

READING_DELAY_S = (50e-6, 5e-3)
"""Seconds between checks of running reads: for one that has just started, and for a long one."""
SERVING_DELAY_S = 500e-6
"""Seconds between progress calls while peers are expected to read from this worker."""
SETTLING_DELAY_S = 50e-3
"""Seconds between progress calls while fences of failed reads, or of dead peers, wait to pass."""
IDLE_DELAY_S = 200e-3
"""Seconds between other progress calls, as a read may outlive the request that announced it. A call
costs 100 to 250 microseconds, most of them for waking up."""


class TransferAgent:
    """The `Transfers` of this worker: its end of all KV transfers.

    Its methods may be called from any thread. They queue commands, which the transfer thread runs
    in order. The pools stay registered with NIXL until the process ends, though not always by the
    same NIXL agent (`Endpoints`).

    Args:
        incarnation: this worker's; also the NIXL agent's name, so that a restarted worker is a new
            peer to all others.
        pools: the memory that peers read from and that pulls write to; of one device.
        on_failure: called once, on the transfer thread, if it must give up.
        model: computes the pools' KV; peers must have the same.
        before_progress: called on the transfer thread before anything that may move bytes. It ends
            the process if the process must not serve any more.
        host_pools: the host tier's, which peers may read, too; one for each of `pools`, or none.
    """

    def __init__(
        self,
        incarnation: str,
        pools: Sequence[KVPool],
        on_failure: Callable[[str], None],
        model: ModelDigest = NO_MODEL,
        before_progress: Callable[[], object] = lambda: None,
        host_pools: Sequence[KVPool] = (),
    ) -> None:
        self.incarnation = incarnation
        self.model = model
        self.layouts = tuple(map(PoolLayout.of, pools))
        self.host_layouts = tuple(map(PoolLayout.of, host_pools))
        self.scratch = make_scratch(pools[0], incarnation)
        self._scratch_layout = PoolLayout.of(self.scratch)
        self.slow_calls = WorkInProgress()
        """The call of NIXL that the thread is in, if it is one that may take seconds."""
        self._device = pools[0].data.device
        use_device(self._device)  # this thread registers
        memory = (*self.layouts, self._scratch_layout)
        self._endpoints = Endpoints(
            incarnation, memory, self._in_slow_call, for_peers=self.host_layouts
        )
        self.transports = describe_transports(on_gpu=self._device.type == "cuda")
        """The transports that UCX may choose from."""
        self._reads = ReadsFromPeers(self._endpoints, self.layouts)
        self._peers = Peers(self._endpoints, self._reads)
        self._num_serving = 0
        self._closed = False
        self._on_failure = on_failure
        self._before_progress = before_progress
        self._hasher = PageHasher(pools, on_failure, host_pools)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Apart from the commands, so that it is called however many of those wait.
        self._on_alive: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    @property
    def num_serving(self) -> int:
        """The number of requests whose pages peers may read."""
        return self._num_serving

    @property
    def hashing(self) -> WorkInProgress:
        """The pages that are being hashed, and for how long."""
        return self._hasher.work

    def describe(self) -> PeerDescription:
        """Describe this worker's pools, as peers need it to read them.

        A worker that reads itself calls `make_readable` first.
        """
        metadata = self._endpoints.readable.metadata
        digest = hashlib.sha256(metadata).digest()
        return PeerDescription(
            self.incarnation,
            metadata,
            digest,
            self.layouts,
            self._scratch_layout,
            self.model,
            self.host_layouts,
        )

    def make_readable(self, on_ready: Callable[[AgentDescription], None]) -> None:
        """Prepare to be read by peers; see `Transfers`."""
        self.call_soon(lambda: self._make_readable(on_ready))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of each pool, summed."""
        return sum(layout.geometry.page_bytes for layout in self.layouts)

    def meet(self, incarnation: str, plain: AgentDescription) -> None:
        """Make a peer's pools readable, after a check of its description; see `Transfers`."""
        description = PeerDescription.read(plain)
        description.check(incarnation, self.layouts, self.model)
        self.add_peer(description)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` on the transfer thread, after the commands before it."""
        self._commands.put(function)

    def add_peer(self, peer: PeerDescription) -> None:
        """Make a peer's pools readable. Check the description first: its bytes are untrusted.

        A known peer is connected anew if reads from it have failed.
        """
        self.call_soon(lambda: self._peers.add(peer))

    def reconnect(self, incarnation: str) -> None:
        """Connect anew to a peer that was added, if reads from it have failed."""
        self.call_soon(lambda: self._peers.reconnect(incarnation))

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        """Call `on_passed` whenever fences of failed reads have passed; see `Transfers`."""
        self.call_soon(lambda: self._reads.watch_fences(on_passed))

    def confirm_death(self, incarnation: str) -> None:
        """Note that a peer's process is gone, so that fences on it can pass; see `Transfers`."""
        self.call_soon(lambda: self._peers.confirm_death(incarnation))

    def pull(
        self,
        peer: str,
        local_pages: Sequence[Int64Array],
        remote_pages: Sequence[Int64Array],
        on_end: Callable[[Pull], None],
        *,
        from_host: bool = False,
    ) -> Pull:
        """Start to read pages of a peer into pages of this worker; see `Transfers`."""
        pull = Pull(peer, tuple(local_pages), tuple(remote_pages), from_host=from_host)
        self.submit(pull, on_end)
        return pull

    def submit(self, pull: Pull, on_end: Callable[[Pull], None]) -> None:
        """Start an existing pull. `on_end` is called once, on the transfer thread."""
        self.call_soon(lambda: self._reads.start_pull(pull, self._peers.find(pull.peer), on_end))

    def make_landing(self, on_refusal: Callable[[], None]) -> KVPool:
        """Make pages that one peer's scratch pages can be read into, and register them.

        Args:
            on_refusal: called if NIXL refuses the pages, on the transfer thread and before any read
                into them ends. No byte ever arrives in them then.
        """
        landing = make_landing(self.scratch)
        layout = PoolLayout.of(landing)

        def register() -> None:
            if not self._endpoints.register(layout):
                on_refusal()

        self.call_soon(register)
        return landing

    def read_scratch(self, peer: str, landing: KVPool, on_end: Callable[[Pull], None]) -> Pull:
        """Start to read a peer's constant scratch pages into pages of `make_landing`.

        The pieces have the pool's size, and no two are adjacent on both sides. `on_end` is called
        once, on the transfer thread.
        """
        constant = constant_pages(self.scratch)
        return self._probe("READ", Pull(peer, (constant[::-1],), (constant,)), landing, on_end)

    def read_host(
        self, peer: str, host_pages: int, landing: KVPool, on_end: Callable[[Pull], None]
    ) -> Pull:
        """Start to read pages of a peer's host tier, whatever they hold; else like `read_scratch`.

        It reads the first pool, which has pages like the scratch pages. It reads from the first
        page on, as many as fit into `landing`. `host_pages` is the size of the peer's pool.
        """
        remote = np.arange(min(landing.total_pages, host_pages))
        pull = Pull(peer, (remote[::-1],), (remote,), from_host=True)
        return self._probe("READ", pull, landing, on_end)

    def write_scratch(self, peer: str, on_end: Callable[[Pull], None]) -> Pull:
        """Start to write to a peer's scratch pages for writes; else like `read_scratch`."""
        local, remote = constant_pages(self.scratch), landing_pages(self.scratch)
        return self._probe("WRITE", Pull(peer, (local,), (remote,)), self.scratch, on_end)

    def _probe(
        self, operation: Operation, pull: Pull, local: KVPool, on_end: Callable[[Pull], None]
    ) -> Pull:
        layout = PoolLayout.of(local)
        self.call_soon(
            lambda: self._reads.start_probe(
                pull, self._peers.find(pull.peer), operation, layout, on_end
            )
        )
        return pull

    def report_alive(self, on_alive: Callable[[], object]) -> None:
        """Call `on_alive` at the end of the transfer thread's next pass.

        It is called at once while the thread is in one of `slow_calls`, whose length is watched
        separately. On a busy machine making a new agent takes longer than a worker may be silent.
        """
        self._on_alive.put(on_alive)
        if self.slow_calls.oldest is not None:
            self._say_alive()

    def begin_serving(self) -> None:
        """Note that a peer may read pages of one more request; progress is made more often."""
        self.call_soon(lambda: self._change_serving(+1))

    def end_serving(self) -> None:
        """Note that a peer no longer reads the pages of one request."""
        self.call_soon(lambda: self._change_serving(-1))

    def hash_pages(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Start to compute checksums of pages here, on the hasher's thread; see `Transfers`."""
        self._hasher.submit(pages, on_end)

    @property
    def has_ended(self) -> bool:
        """Whether the transfer thread has ended: it was closed, and nothing hung."""
        return not self._thread.is_alive()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the threads; give up what has not ended after `seconds`.

        The registration stays: a peer may still be reading.
        """
        ends_at = time.monotonic() + seconds
        self._hasher.close(seconds)
        self.call_soon(self._close)
        if not ended_within(self._thread, seconds_until(ends_at)):
            logger.error("the transfer thread has not ended for %g s", seconds)

    # On the transfer thread

    def _run(self) -> None:
        try:
            use_device(self._device)
            while not self._closed:
                self._run_command()
                self._before_progress()
                self._endpoints.make_progress()
                self._reads.check_running()
                self._peers.settle()
                self._say_alive()
        except Exception as error:
            logger.exception("the transfer agent gives up")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _say_alive(self) -> None:
        """Call all functions that wait for it; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._on_alive.get_nowait()()

    @contextlib.contextmanager
    def _in_slow_call(self) -> Iterator[None]:
        self.slow_calls.begin(0)
        self._say_alive()  # later callers of `report_alive` see the slow call
        try:
            yield
        finally:
            self.slow_calls.end()

    def _run_command(self) -> None:
        """Sleep until a command comes, and run it; or until progress is due."""
        try:
            command = self._commands.get(timeout=self._delay())
        except queue.Empty:
            return
        self._before_progress()  # a command may start a read
        command()

    def _delay(self) -> float:
        """Compute the seconds until progress is due."""
        age = self._reads.seconds_since_start()
        if age is not None:
            shortest, longest = READING_DELAY_S
            return min(max(age / 50, shortest), longest)
        if self._num_serving:
            return SERVING_DELAY_S
        return IDLE_DELAY_S if self._peers.is_settled else SETTLING_DELAY_S

    def _close(self) -> None:
        self._closed = True

    def _make_readable(self, on_ready: Callable[[AgentDescription], None]) -> None:
        try:
            self._endpoints.make_readable()
        except Exception:  # NIXL's exceptions have no common base
            logger.exception("could not make a NIXL agent that peers can read")
            return
        on_ready(self.describe().plain())

    def _change_serving(self, change: int) -> None:
        self._num_serving += change
