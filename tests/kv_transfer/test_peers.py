"""Peers that die, restart or lose their connection: real NIXL between two processes."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.nixl_endpoint import NixlTransfer
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import WAIT_S, Peer, assert_page, read


def test_killed_peer_fails_the_pull_and_its_pages_wait_for_the_confirmation(
    agent: TransferAgent,
) -> None:
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


def test_death_is_confirmed_while_a_read_is_running(agent: TransferAgent) -> None:
    """A stopped peer answers nothing; its death ends the read, and only then its fence passes."""
    peer = Peer()
    peer.freeze()
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


def test_scenario_40_restarted_peer_is_a_new_peer(agent: TransferAgent, pool: KVPool) -> None:
    first = Peer()
    agent.add_peer(first.description)
    assert read(agent, first, [1], [1]).state is PullState.DONE
    first.kill()
    second = Peer()
    agent.add_peer(second.description)
    assert read(agent, second, [2], [7]).state is PullState.DONE
    assert_page(pool, 2, 7)
    second.stop()


def test_a_connection_that_broke_is_made_anew(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    """NIXL reports a failure of a peer that lives; its pages still wait for its death."""
    peer = Peer()
    agent.add_peer(peer.description)
    with monkeypatch.context() as patch:
        patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
        broken = read(agent, peer, [1], [1])
    assert broken.state is PullState.FAILED
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    assert_page(pool, 2, 7)
    assert not broken.passed()
    peer.kill()
    settled = threading.Event()
    agent.confirm_death(peer.description.incarnation, settled.set)
    assert settled.wait(WAIT_S)
    assert broken.passed()
