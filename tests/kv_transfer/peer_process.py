"""A peer in a process of its own, and what tests do to its pool."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.hand_over import PagePlace, PageSum

PAGES = 64
WAIT_S = 30
PROCESSES = multiprocessing.get_context("forkserver")
"""Makes processes that have imported what takes long, and have no thread and no NIXL agent yet."""
PROCESSES.set_forkserver_preload(
    ["kvrelay.kv_transfer.agent", "tests.kv_transfer.with_nixl", __name__]
)
_made: list[ForkServerProcess] = []
"""Those that may still run."""

HOST_PAGES = 24
"""Of a peer's host pool."""


def make_pool(
    order: PageOrder = PageOrder.PAGE_FIRST, page_size: int = 16, pages: int = PAGES
) -> KVPool:
    geometry = KVGeometry(4, 2, 32, torch.float32, page_size, order)
    return KVPool(geometry, pages, torch.device("cpu"))


def fill(pool: KVPool, first: int = 0) -> None:
    """Every page and layer says which it is; `first` is what page 0 says."""
    for layer in range(pool.geometry.num_layers):
        pages = torch.arange(first, first + pool.total_pages)
        pool.layer(layer)[:] = pages.view(-1, 1, 1, 1, 1) * 10.0 + layer


def in_environment(environment: Mapping[str, str], work: Callable[..., None], *args: Any) -> None:
    """Do some work with the environment of who asks for it: UCX reads it for each agent."""
    os.environ.update(environment)
    work(*args)


def process_of(work: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that has begun to work, with this process's environment."""
    asked = (dict(os.environ), work, *args)
    process = PROCESSES.Process(target=in_environment, args=asked, daemon=True)
    process.start()
    _made.append(process)
    return process


def kill_processes() -> None:
    """Those that a test has left, as one that failed does.

    Python would end them in a way that one that was stopped does not notice, and wait for ever.
    """
    while _made:
        process = _made.pop()
        process.kill()
        process.join()


def serve(connection: Connection, order: PageOrder, page_size: int, serving: bool) -> None:
    """A peer: its pools are readable until it is told to stop. The host's begin with `PAGES`."""
    pool, host = make_pool(order, page_size), make_pool(page_size=page_size, pages=HOST_PAGES)
    fill(pool)
    fill(host, PAGES)
    agent = TransferAgent(f"peer-{os.getpid()}", [pool], print, host_pools=[host])
    if serving:
        agent.begin_serving()
    connection.send(agent.describe())
    while (page := connection.recv()) != "stop":
        connection.send(sums(agent, page))
    agent.close()


class Peer:
    """A peer process."""

    def __init__(
        self, order: PageOrder = PageOrder.PAGE_FIRST, page_size: int = 16, serving: bool = True
    ) -> None:
        self.connection, theirs = PROCESSES.Pipe()
        self.process = process_of(serve, theirs, order, page_size, serving)
        self.description: PeerDescription = self.connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """Stop the process, so that it answers nothing, until `thaw`. Waits for its last thread."""
        self._signal(signal.SIGSTOP)
        give_up_at = time.monotonic() + WAIT_S
        while not self._has_stopped():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _has_stopped(self) -> bool:
        """Whether each thread has; its parent alone could wait for it."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        try:
            states = {thread.read_text().rpartition(")")[2].split()[0] for thread in threads}
        except (FileNotFoundError, ProcessLookupError):  # one has ended since it was listed
            return False
        return states == {"T"}

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.is_alive():
            self.thaw()
            self.connection.send("stop")
        self.process.join()


def read(
    agent: TransferAgent,
    peer: Peer,
    local: list[int],
    remote: list[int],
    *,
    from_host: bool = False,
) -> Pull:
    """Pull and wait for the end."""
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    pages = [np.array(local)], [np.array(remote)]
    agent.pull(peer.description.incarnation, *pages, ended.put, from_host=from_host)
    return ended.get(timeout=WAIT_S)


def assert_page(pool: KVPool, page: int, source: int) -> None:
    for layer in range(pool.geometry.num_layers):
        assert (pool.layer(layer)[page] == source * 10.0 + layer).all()


def sums(agent: TransferAgent, page: int) -> int:
    ended: queue.SimpleQueue[tuple[PageSum, ...]] = queue.SimpleQueue()
    agent.hash_pages([LocalPage(PagePlace(0, 0), page, 16)], ended.put)
    return ended.get(timeout=WAIT_S)[0].value
