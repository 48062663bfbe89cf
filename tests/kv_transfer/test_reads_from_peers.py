"""Reads of a peer's pages: real NIXL between two processes."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import (
    HOST_PAGES,
    PAGES,
    WAIT_S,
    Peer,
    assert_page,
    make_pool,
    read,
    sums,
)
from tests.pairwise import few


@few(1)
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


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("own", list(PageOrder))
def test_pages_of_a_peers_host_are_read_into_pools_of_any_order(
    order: PageOrder, own: PageOrder
) -> None:
    """The host's lie page by page, whatever the order of the device's; both are read at once."""
    pool = make_pool(own)
    agent = TransferAgent(f"reader-{time.monotonic_ns()}", [pool], print)
    peer = Peer(order)
    description = PeerDescription.read(peer.description.plain())
    description.check(peer.description.incarnation, agent.layouts, agent.model)
    agent.add_peer(description)
    pull = read(agent, peer, [3, 4, 60], [7, 8, HOST_PAGES - 1], from_host=True)
    assert (pull.state, pull.error) == (PullState.DONE, "")
    assert read(agent, peer, [5], [7]).state is PullState.DONE
    for local, source in [(3, PAGES + 7), (4, PAGES + 8), (60, PAGES + HOST_PAGES - 1), (5, 7)]:
        assert_page(pool, local, source)
    outside = read(agent, peer, [1], [HOST_PAGES], from_host=True)
    assert f"[0, {HOST_PAGES})" in outside.error
    assert outside.passed()
    peer.stop()
    agent.close()


def test_an_agent_that_reads_does_not_register_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers know another one. To register a large host takes long, and again for each new agent."""
    registered: list[int] = []
    make = NixlEndpoint.__init__

    def record(endpoint: NixlEndpoint, name: str, memory: Sequence[PoolLayout]) -> None:
        registered.append(sum(part.total_pages == HOST_PAGES for part in memory))
        make(endpoint, name, memory)

    monkeypatch.setattr(NixlEndpoint, "__init__", record)
    host = make_pool(pages=HOST_PAGES)
    agent = TransferAgent(f"both-{time.monotonic_ns()}", [make_pool()], print, host_pools=[host])
    assert agent.describe().host_layouts
    peer = Peer()
    agent.add_peer(peer.description)
    assert read(agent, peer, [3], [7]).state is PullState.DONE
    assert registered == [1, 0]
    peer.stop()
    agent.close()


def test_a_peer_without_a_host_pool_cannot_be_read_there(agent: TransferAgent) -> None:
    peer = Peer()
    agent.add_peer(dataclasses.replace(peer.description, host_layouts=()))
    pull = read(agent, peer, [1], [1], from_host=True)
    assert pull.state is PullState.FAILED
    assert pull.passed()
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
