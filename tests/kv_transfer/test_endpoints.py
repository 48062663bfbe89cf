"""No byte comes after the end of the NIXL agent that read: real late bytes, by TCP."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.nixl_endpoint import NixlTransfer
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import PAGES, WAIT_S, Peer, make_pool

LATE_PAGES = np.arange(PAGES // 2, PAGES)
OTHER_PAGES = np.arange(4)


def read(agent: TransferAgent, peer: str, pages: np.ndarray) -> Pull:
    """Read a peer's pages into the same ones here, and wait for the end."""
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    agent.pull(peer, [pages], [pages], ended.put)
    return ended.get(timeout=WAIT_S)


def wait_until_passed(agent: TransferAgent, pull: Pull) -> None:
    while not pull.passed():
        alive = threading.Event()
        agent.report_alive(alive.set)
        assert alive.wait(WAIT_S)


def count_late(pool: KVPool) -> int:
    """Pages of the failed read that hold something."""
    return sum(bool((pool.layer(1)[page] != 0).any()) for page in LATE_PAGES)


def read_late(connection: Connection, replaces: bool) -> None:
    """A reader whose read is called failed while its bytes have yet to come."""
    pool = make_pool()
    agent = TransferAgent("reader-by-tcp", [pool], print)
    peer: PeerDescription = connection.recv()
    agent.add_peer(peer)
    read(agent, peer.incarnation, OTHER_PAGES)
    connection.send("connected")
    assert connection.recv() == "frozen"
    with mock.patch.object(NixlTransfer, "check", return_value="ERR"):
        pull = read(agent, peer.incarnation, LATE_PAGES)
    if replaces:
        agent.add_peer(peer)
        wait_until_passed(agent, pull)
    connection.send(count_late(pool))
    assert connection.recv() == "thawed"
    # What the peer was asked for before, it has sent by the end of a later read.
    read(agent, peer.incarnation, OTHER_PAGES)
    connection.send(count_late(pool))
    connection.recv()


@pytest.mark.parametrize("replaces", [False, True])
def test_bytes_come_after_an_error_and_none_after_the_agents_end(
    monkeypatch: pytest.MonkeyPatch, *, replaces: bool
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    peer = Peer()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    reader = context.Process(target=read_late, args=(theirs, replaces), daemon=True)
    reader.start()
    mine.send(peer.description)
    assert mine.recv() == "connected"
    peer.freeze()
    mine.send("frozen")
    assert mine.recv() == 0
    peer.thaw()
    mine.send("thawed")
    assert mine.recv() == (0 if replaces else len(LATE_PAGES))
    reader.kill()
    peer.kill()  # UCX may have ended it when the reader's agent hung up
