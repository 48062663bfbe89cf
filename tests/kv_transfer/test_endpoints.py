"""No byte comes after the end of the NIXL agent that read: real late bytes, by TCP.

It is the only end of a connection that NIXL gives: to remove a peer closes none.
"""

from __future__ import annotations

import queue
import threading
import time
from enum import StrEnum
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import psutil
import pytest

from kvrelay.kv_transfer import peers
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.nixl_endpoint import NixlTransfer
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import PAGES, PROCESSES, WAIT_S, Peer, make_pool, process_of
from tests.kv_transfer.planted import plant_early_fences
from tests.pairwise import few

LATE_PAGES = np.arange(PAGES // 2, PAGES)
OTHER_PAGES = np.arange(4)
NONE_COMES_S = 1.0
"""For bytes that must not come: a peer that goes on sends what it was asked for within a few
milliseconds."""


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


class After(StrEnum):
    """What happens to a read whose bytes have yet to come."""

    ERROR = "an error"
    ERROR_AND_ANSWER = "an error, and the peer answers again"
    DEATH = "the death of its peer, of which NIXL has noticed nothing"
    DEATH_PLANTED = "the same, with a fence that passes when NIXL has removed the peer"


COME_LATE = {After.ERROR, After.DEATH_PLANTED}


def end_early(agent: TransferAgent, peer: PeerDescription, after: After) -> Pull:
    """Read from a frozen peer what NIXL, or the controller, says will not come any more."""
    if after in (After.ERROR, After.ERROR_AND_ANSWER):
        with mock.patch.object(NixlTransfer, "check", return_value="ERR"):
            pull = read(agent, peer.incarnation, LATE_PAGES)
        if after is After.ERROR_AND_ANSWER:
            agent.add_peer(peer)
        return pull
    if after is After.DEATH_PLANTED:
        plant_early_fences()
    pull = agent.pull(peer.incarnation, [LATE_PAGES], [LATE_PAGES], lambda _: None)
    agent.confirm_death(peer.incarnation)
    return pull


def read_late(connection: Connection, after: After) -> None:
    """A reader whose read is called failed while its bytes have yet to come."""
    mock.patch.object(peers, "ENDS_BY_ITSELF_S", 0.1).start()
    pool = make_pool()
    agent = TransferAgent("reader-by-tcp", [pool], print)
    peer: PeerDescription = connection.recv()
    agent.add_peer(peer)
    read(agent, peer.incarnation, OTHER_PAGES)
    connection.send("connected")
    assert connection.recv() == "frozen"
    pull = end_early(agent, peer, after)
    if after is not After.ERROR:
        wait_until_passed(agent, pull)
    connection.send(count_late(pool))
    while connection.recv() == "count":
        connection.send(count_late(pool))


def are_connected(one: int, other: int) -> bool:
    """Whether two processes have a TCP connection to each other."""
    mine, theirs = _connections(one), _connections(other)
    return any((there, here) in theirs for here, there in mine)


def _connections(pid: int) -> set[tuple[object, object]]:
    used = psutil.Process(pid).net_connections("tcp")
    return {(one.laddr, one.raddr) for one in used if one.status == psutil.CONN_ESTABLISHED}


@few(1)
@pytest.mark.parametrize("after", list(After))
def test_bytes_come_after_an_error_and_none_after_the_agents_end(
    monkeypatch: pytest.MonkeyPatch, after: After
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    peer = Peer()
    mine, theirs = PROCESSES.Pipe()
    reader = process_of(read_late, theirs, after)
    assert reader.pid is not None
    assert peer.process.pid is not None
    try:
        mine.send(peer.description)
        assert mine.recv() == "connected"
        assert are_connected(reader.pid, peer.process.pid)
        peer.freeze()
        mine.send("frozen")
        assert mine.recv() == 0
        assert are_connected(reader.pid, peer.process.pid) is (after in COME_LATE)
        peer.thaw()
        if after in COME_LATE:
            assert arrived(mine, WAIT_S) == len(LATE_PAGES)
        else:
            assert arrived(mine, NONE_COMES_S) == 0
    finally:
        reader.kill()
        peer.kill()  # UCX may have ended it when the reader's agent hung up


def arrived(reader: Connection, seconds: float) -> int:
    """The late pages that have come, when all have, or after so long."""
    give_up_at = time.monotonic() + seconds
    while True:
        reader.send("count")
        late: int = reader.recv()
        if late == len(LATE_PAGES) or time.monotonic() > give_up_at:
            return late
        time.sleep(0.02)
