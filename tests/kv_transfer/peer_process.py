"""A peer in a process of its own, and what tests do to its pool."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.hand_over import PageSum, Place

PAGES = 64
WAIT_S = 30


def make_pool(order: PageOrder = PageOrder.PAGE_FIRST, page_size: int = 16) -> KVPool:
    geometry = KVGeometry(4, 2, 32, torch.float32, page_size, order)
    return KVPool(geometry, PAGES, torch.device("cpu"))


def fill(pool: KVPool) -> None:
    """Every page and layer says which it is."""
    for layer in range(pool.geometry.num_layers):
        pool.layer(layer)[:] = torch.arange(PAGES).view(-1, 1, 1, 1, 1) * 10.0 + layer


def serve(connection: Connection, order: PageOrder, page_size: int, serving: bool) -> None:
    """A peer: its pool is readable until it is told to stop."""
    pool = make_pool(order, page_size)
    fill(pool)
    agent = TransferAgent(f"peer-{os.getpid()}", [pool], print)
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
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, order, page_size, serving), daemon=True
        )
        self.process.start()
        self.description: PeerDescription = self.connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """Stop the process, so that it answers nothing, until `thaw`. Waits for its last thread."""
        self._signal(signal.SIGSTOP)
        assert self.process.pid is not None
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.is_alive():
            self.thaw()
            self.connection.send("stop")
        self.process.join()


def read(agent: TransferAgent, peer: Peer, local: list[int], remote: list[int]) -> Pull:
    """Pull and wait for the end."""
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    agent.pull(peer.description.incarnation, [np.array(local)], [np.array(remote)], ended.put)
    return ended.get(timeout=WAIT_S)


def assert_page(pool: KVPool, page: int, source: int) -> None:
    for layer in range(pool.geometry.num_layers):
        assert (pool.layer(layer)[page] == source * 10.0 + layer).all()


def sums(agent: TransferAgent, page: int) -> int:
    ended: queue.SimpleQueue[tuple[PageSum, ...]] = queue.SimpleQueue()
    agent.hash_pages([LocalPage(Place(0, 0), page, 16)], ended.put)
    return ended.get(timeout=WAIT_S)[0].value
