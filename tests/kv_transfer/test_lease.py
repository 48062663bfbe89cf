"""A peer that must not serve any more: real NIXL between two processes, over TCP."""

from __future__ import annotations

import os
import queue
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

from kvrelay.engine.worker.worker_lease import WorkerLease
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import PAGES, PROCESSES, Peer, fill, make_pool, process_of

LEASE_SECONDS = 3.0
RAN_OUT = 72


def serve_by_lease(connection: Connection) -> None:
    """A peer that serves for as long as its lease lasts, and has begun to when it says so."""
    pool = make_pool()
    fill(pool)
    lease = WorkerLease()
    agent = TransferAgent(f"leased-{os.getpid()}", [pool], print, before_progress=lease.check)
    agent.begin_serving()
    connection.send(agent.describe())
    connection.recv()
    lease.begin(LEASE_SECONDS, lambda: os._exit(RAN_OUT))
    connection.send("begun")
    threading.Event().wait()


class LeasedPeer(Peer):
    def __init__(self) -> None:
        self.connection, theirs = PROCESSES.Pipe()
        self.process = process_of(serve_by_lease, theirs)
        self.description = self.connection.recv()

    def begin_lease(self) -> None:
        self.connection.send("begin")
        assert self.connection.recv() == "begun"


def test_a_frozen_peer_that_wakes_after_its_lease_ends_and_serves_no_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # or the reader would copy by itself
    peer = LeasedPeer()
    mine, theirs = PROCESSES.Pipe()
    reader = process_of(read_from_frozen, theirs)
    try:
        mine.send(peer.description)
        assert mine.recv() == "connected"
        peer.begin_lease()
        peer.freeze()
        mine.send("frozen")
        assert mine.recv() == "asked"
        time.sleep(LEASE_SECONDS)
        peer.thaw()
        peer.process.join(timeout=30)
        assert peer.process.exitcode == RAN_OUT
        mine.send("ended")
        assert mine.recv() == 0
    finally:
        reader.kill()
        peer.kill()


def read_from_frozen(connection: Connection) -> None:
    """A reader whose read begins while the peer is frozen; says how many pages have arrived."""
    pool = make_pool()
    agent = TransferAgent("reader-of-frozen", [pool], print)
    description = connection.recv()
    agent.add_peer(description)
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    first, others = np.array([0]), np.arange(1, PAGES)
    agent.pull(description.incarnation, [first], [first], ended.put)
    assert ended.get().state is PullState.DONE
    connection.send("connected")
    assert connection.recv() == "frozen"
    late = agent.pull(description.incarnation, [others], [others], ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.2)
    connection.send("asked")
    assert connection.recv() == "ended"
    assert late.state is not PullState.DONE
    connection.send(num_arrived(pool))
    connection.recv()


def num_arrived(pool: KVPool) -> int:
    return sum(bool((pool.layer(1)[page] != 0).any()) for page in range(1, PAGES))
