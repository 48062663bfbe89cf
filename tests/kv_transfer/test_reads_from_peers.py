"""Reads of a peer's pages: real NIXL between two processes."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import PAGES, WAIT_S, Peer, assert_page, read, sums


@pytest.mark.parametrize("order", list(PageOrder))
def test_pull_moves_exactly_the_pages(agent: TransferAgent, order: PageOrder, pool: KVPool) -> None:
    peer = Peer(order)
    peer.description.check(peer.description.incarnation, agent.layouts, agent.model)
    agent.add_peer(peer.description)
    pull = read(agent, peer, [3, 4, 5, 60], [10, 11, 12, 0])
    assert (pull.state, pull.error) == (PullState.DONE, "")
    assert pull.passed()
    assert pull.nbytes == 4 * agent.layouts[0].geometry.page_bytes
    for local, remote in [(3, 10), (4, 11), (5, 12), (60, 0)]:
        assert_page(pool, local, remote)
    untouched = [page for page in range(PAGES) if page not in (3, 4, 5, 60)]
    assert all((pool.layer(layer)[untouched] == 0).all() for layer in range(4))
    peer.stop()


def test_many_pulls_at_once(agent: TransferAgent, pool: KVPool) -> None:
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
        assert_page(pool, local, int(remote))
    peer.stop()


def test_peer_that_expects_nothing_still_lets_itself_be_read(agent: TransferAgent) -> None:
    """The request that announced the pages may have ended: the read must end all the same."""
    peer = Peer(serving=False)
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    peer.stop()


def test_unknown_peer_and_page_out_of_range_fail_without_a_fence(agent: TransferAgent) -> None:
    peer = Peer()
    unknown = read(agent, peer, [1], [1])
    assert unknown.state is PullState.FAILED
    assert unknown.passed()
    agent.add_peer(peer.description)
    outside = read(agent, peer, [1], [PAGES])
    assert f"[0, {PAGES})" in outside.error
    assert outside.passed()
    peer.stop()


@pytest.mark.parametrize("order", list(PageOrder))
def test_a_byte_that_changes_on_the_way_changes_the_sum(
    agent: TransferAgent, order: PageOrder, pool: KVPool
) -> None:
    peer = Peer(order)
    agent.add_peer(peer.description)
    peer.connection.send(12)
    expected = peer.connection.recv()
    assert read(agent, peer, [3], [12]).state is PullState.DONE
    assert sums(agent, 3) == expected
    pool.layer(2)[3].view(torch.uint8)[0, 1, 4, 7] ^= 16
    assert sums(agent, 3) != expected
    peer.stop()
