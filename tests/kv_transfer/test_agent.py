"""Real NIXL between two processes."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.attestation import Prober
from kvrelay.kv_transfer.checksums import LocalPage, PageSum, Place
from kvrelay.kv_transfer.errors import PeerRefusedError
from kvrelay.kv_transfer.peer import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool

PAGES = 64
WAIT_S = 30


def make_pool(order: PageOrder = PageOrder.PAGE_FIRST, page_size: int = 16) -> KVPool:
    geometry = KVGeometry(4, 2, 32, torch.float32, page_size, order)
    return KVPool(geometry, PAGES, torch.device("cpu"))


def fill(pool: KVPool) -> None:
    """Every page and layer says which it is."""
    for layer in range(pool.geometry.num_layers):
        pool.layer(layer)[:] = torch.arange(PAGES).view(-1, 1, 1, 1, 1) * 10.0 + layer


def serve(connection: Connection, order: PageOrder, page_size: int, serving: int) -> None:
    """A peer: its pool is readable until it is told to stop."""
    pool = make_pool(order, page_size)
    fill(pool)
    agent = TransferAgent(f"peer-{os.getpid()}", [pool], print)
    agent.serve(serving)
    connection.send(agent.describe())
    while (page := connection.recv()) != "stop":
        connection.send(sums(agent, page))
    agent.close()


class Peer:
    """A peer process."""

    def __init__(
        self, order: PageOrder = PageOrder.PAGE_FIRST, page_size: int = 16, serving: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, order, page_size, serving))
        self.process.start()
        self.description: PeerDescription = self.connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
            self.connection.send("stop")
        self.process.join()


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    pool = make_pool()
    agent = TransferAgent(f"reader-{time.monotonic_ns()}", [pool], print)
    agent.pool = pool
    yield agent
    agent.close()


def read(agent: TransferAgent, peer: Peer, local: list[int], remote: list[int]) -> Pull:
    """Pull and wait for the end."""
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    agent.pull(peer.description.incarnation, [np.array(local)], [np.array(remote)], ended.put)
    return ended.get(timeout=WAIT_S)


def assert_page(pool: KVPool, page: int, source: int) -> None:
    for layer in range(pool.geometry.num_layers):
        assert (pool.layer(layer)[page] == source * 10.0 + layer).all()


@pytest.mark.parametrize("order", list(PageOrder))
def test_pull_moves_exactly_the_pages(agent, order):
    peer = Peer(order)
    peer.description.check(peer.description.incarnation, agent.layouts)
    agent.add_peer(peer.description)
    pull = read(agent, peer, [3, 4, 5, 60], [10, 11, 12, 0])
    assert (pull.state, pull.error) == (PullState.DONE, "")
    assert pull.passed()
    assert pull.nbytes == 4 * agent.layouts[0].geometry.page_bytes
    for local, remote in [(3, 10), (4, 11), (5, 12), (60, 0)]:
        assert_page(agent.pool, local, remote)
    untouched = [page for page in range(PAGES) if page not in (3, 4, 5, 60)]
    assert all((agent.pool.layer(layer)[untouched] == 0).all() for layer in range(4))
    peer.stop()


def test_many_pulls_at_once(agent):
    peer = Peer()
    agent.add_peer(peer.description)
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    order = np.random.default_rng(0).permutation(PAGES)
    for local, remote in enumerate(order):
        pages = [np.array([local])], [np.array([remote])]
        agent.pull(peer.description.incarnation, *pages, ended.put)
    pulls = [ended.get(timeout=WAIT_S) for _ in range(PAGES)]
    assert {pull.state for pull in pulls} == {PullState.DONE}
    for local, remote in enumerate(order):
        assert_page(agent.pool, local, int(remote))
    peer.stop()


def test_killed_peer_fails_the_pull_and_its_pages_wait_for_the_confirmation(agent):
    peer = Peer()
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    peer.kill()
    pull = read(agent, peer, list(range(32)), list(range(32)))
    assert pull.state is PullState.FAILED
    assert not pull.passed(), "an error alone does not prove that no byte arrives"
    settled = threading.Event()
    agent.confirm_death(peer.description.incarnation, settled.set)
    assert settled.wait(WAIT_S)
    assert pull.passed()
    agent.add_peer(peer.description)
    again = read(agent, peer, [1], [1])
    assert "is not known" in again.error, "a dead worker does not come back"
    assert again.passed()


def test_death_is_confirmed_while_a_read_is_running(agent):
    """A stopped peer answers nothing; its death ends the read, and only then its fence passes."""
    peer = Peer()
    os.kill(peer.process.pid, signal.SIGSTOP)
    agent.add_peer(peer.description)
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    name = peer.description.incarnation
    pull = agent.pull(name, [np.arange(8)], [np.arange(8)], ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.5)
    assert not pull.passed()
    peer.kill()
    settled = threading.Event()
    agent.confirm_death(name, settled.set)
    assert ended.get(timeout=WAIT_S).state is PullState.FAILED
    assert settled.wait(WAIT_S)
    assert pull.passed()


def test_peer_that_expects_nothing_still_lets_itself_be_read(agent):
    """The request that announced the pages may have ended: the read must end all the same."""
    peer = Peer(serving=0)
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    peer.stop()


def test_restarted_peer_is_a_new_peer(agent):
    first = Peer()
    agent.add_peer(first.description)
    assert read(agent, first, [1], [1]).state is PullState.DONE
    first.kill()
    second = Peer()
    agent.add_peer(second.description)
    assert read(agent, second, [2], [7]).state is PullState.DONE
    assert_page(agent.pool, 2, 7)
    second.stop()


def test_a_connection_that_broke_is_made_anew(agent, monkeypatch):
    """NIXL reports a failure of a peer that lives; its pages still wait for its death."""
    peer = Peer()
    agent.add_peer(peer.description)
    with monkeypatch.context() as patch:
        patch.setattr(agent._agent, "transfer", lambda handle: "ERR")
        broken = read(agent, peer, [1], [1])
    assert broken.state is PullState.FAILED
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    assert_page(agent.pool, 2, 7)
    assert not broken.passed()
    peer.kill()
    settled = threading.Event()
    agent.confirm_death(peer.description.incarnation, settled.set)
    assert settled.wait(WAIT_S)
    assert broken.passed()


async def test_a_probe_that_failed_is_made_again(agent, monkeypatch):
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = Prober(agent, floor=0.0), peer.description.incarnation
    with monkeypatch.context() as patch:
        patch.setattr(agent._agent, "transfer", lambda handle: "ERR")
        assert "ended as ERR" in (await prober.measure(name)).refusal
    agent.add_peer(peer.description)
    assert not (await prober.measure(name)).refusal
    peer.stop()


def test_unknown_peer_and_page_out_of_range_fail_without_a_fence(agent):
    peer = Peer()
    unknown = read(agent, peer, [1], [1])
    assert unknown.state is PullState.FAILED
    assert unknown.passed()
    agent.add_peer(peer.description)
    outside = read(agent, peer, [1], [PAGES])
    assert f"[0, {PAGES})" in outside.error
    assert outside.passed()
    peer.stop()


def test_description_is_checked_before_its_bytes_are_loaded(agent):
    own = agent.describe()
    own.check(agent.incarnation, agent.layouts)
    flipped = bytearray(own.metadata)
    flipped[len(flipped) // 2] ^= 1
    with pytest.raises(PeerRefusedError, match="does not match its digest"):
        dataclasses.replace(own, metadata=bytes(flipped)).check(agent.incarnation, agent.layouts)
    with pytest.raises(PeerRefusedError, match="expected worker other"):
        own.check("other", agent.layouts)
    other = dataclasses.replace(agent.layouts[0], geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [other])
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [*agent.layouts, *agent.layouts])


@pytest.mark.parametrize("order", list(PageOrder))
async def test_a_probe_measures_scratch_pages_and_touches_no_others(agent, order):
    peer = Peer(order)
    agent.add_peer(peer.description)
    found = await Prober(agent, floor=0.0).measure(peer.description.incarnation)
    assert (found.peer, found.backend) == (peer.description.incarnation, "UCX")
    assert 0.001 < found.read_gbps < 1000
    assert 0.001 < found.write_gbps < 1000
    assert not found.refusal
    assert all((agent.pool.layer(layer) == 0).all() for layer in range(4))
    pull = read(agent, peer, list(range(PAGES)), list(range(PAGES)))
    assert pull.state is PullState.DONE
    for page in range(PAGES):
        assert_page(agent.pool, page, page)
    asked_too_much = await Prober(agent, floor=1e6).measure(peer.description.incarnation)
    assert asked_too_much.refusal.endswith("(all); 1e+06 are asked for")
    peer.stop()


async def test_a_peer_that_does_not_answer_is_refused_and_left_alone_until_it_does(
    agent, monkeypatch
):
    monkeypatch.setattr("kvrelay.kv_transfer.attestation.ATTEST_S", 0.3)
    prober = Prober(agent, floor=0.0)
    assert "is not known" in (await prober.measure("nobody")).refusal
    silent, other = Peer(), Peer()
    name = silent.description.incarnation
    os.kill(silent.process.pid, signal.SIGSTOP)
    for peer in (silent, other):
        agent.add_peer(peer.description)
    assert (await prober.measure(name)).refusal == f"{name} was not read in 0.3 s"
    assert "an earlier probe has not ended" in (await prober.measure(name)).refusal
    assert not (await prober.measure(other.description.incarnation)).refusal
    os.kill(silent.process.pid, signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        while (await prober.measure(name)).refusal:
            await asyncio.sleep(0.05)
    for peer in (silent, other):
        peer.stop()


async def test_a_probe_sees_other_bytes(agent, monkeypatch):
    peer = Peer()
    agent.add_peer(peer.description)
    monkeypatch.setattr("kvrelay.kv_transfer.scratch._byte", lambda name, page, layer: 7)
    found = await Prober(agent, floor=0.0).measure(peer.description.incarnation)
    assert "other bytes than it has" in found.refusal
    peer.stop()


def test_scratch_pages_are_like_the_pools(agent):
    own = agent.describe()
    other = dataclasses.replace(own.scratch, geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="scratch pages"):
        dataclasses.replace(own, scratch=other).check(agent.incarnation, agent.layouts)


def sums(agent: TransferAgent, page: int) -> int:
    ended: queue.SimpleQueue[tuple[PageSum, ...]] = queue.SimpleQueue()
    agent.hash_pages([LocalPage(Place(0, 0), page, 16)], ended.put)
    return ended.get(timeout=WAIT_S)[0].value


@pytest.mark.parametrize("order", list(PageOrder))
def test_a_byte_that_changes_on_the_way_changes_the_sum(agent, order):
    peer = Peer(order)
    agent.add_peer(peer.description)
    peer.connection.send(12)
    expected = peer.connection.recv()
    assert read(agent, peer, [3], [12]).state is PullState.DONE
    assert sums(agent, 3) == expected
    agent.pool.layer(2)[3].view(torch.uint8)[0, 1, 4, 7] ^= 16
    assert sums(agent, 3) != expected
    peer.stop()


@pytest.mark.alone
def test_idle_agent_uses_no_cpu(agent):
    peer = Peer()
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.02
    peer.stop()
