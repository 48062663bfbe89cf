"""Peers that die, restart or lose their connection: real NIXL between two processes."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvrelay.kv_transfer import endpoints, peers
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint, NixlTransfer
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.agent_description import AgentDescription
from tests.kv_transfer.peer_process import WAIT_S, Peer, assert_page, make_pool, read


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
    agent.watch_fences(settled.set)
    agent.confirm_death(peer.description.incarnation)
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
    agent.watch_fences(settled.set)
    agent.confirm_death(name)
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


def fail_a_read(agent: TransferAgent, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """NIXL reports a failure of a peer that lives."""
    with monkeypatch.context() as patch:
        patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
        broken = read(agent, peer, [1], [1])
    assert broken.state is PullState.FAILED
    assert not broken.passed()
    return broken


def wait_for_a_pass(agent: TransferAgent) -> None:
    """All that was ordered before has begun."""
    alive = threading.Event()
    agent.call_soon(lambda: agent.report_alive(alive.set))
    assert alive.wait(WAIT_S)


def wait_until_passed(agent: TransferAgent, pull: Pull) -> None:
    """Within a few passes of the transfer thread."""
    for _ in range(1000):
        wait_for_a_pass(agent)
        if pull.passed():
            return
    raise AssertionError("its bytes may still arrive")


def test_pages_of_a_failed_read_come_back_though_the_peer_lives(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    peer, other = Peer(), Peer()
    for one in (peer, other):
        agent.add_peer(one.description)
        assert read(agent, one, [1], [1]).state is PullState.DONE
    told = threading.Event()
    agent.watch_fences(told.set)
    broken = fail_a_read(agent, peer, monkeypatch)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    assert_page(pool, 2, 7)
    assert told.wait(WAIT_S), "an engine that has nothing to do would not look"
    assert broken.passed()
    assert read(agent, other, [3], [8]).state is PullState.DONE, "connected anew by itself"
    assert_page(pool, 3, 8)
    for one in (peer, other):
        one.stop()


def test_an_agent_that_is_replaced_ends_with_its_last_read(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    peer, slow = Peer(), Peer()
    for one in (peer, slow):
        agent.add_peer(one.description)
    slow.freeze()
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    agent.pull(slow.description.incarnation, [np.array([5])], [np.array([9])], ended.put)
    wait_for_a_pass(agent)
    broken = fail_a_read(agent, peer, monkeypatch)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    assert not broken.passed(), "the agent that ran it has a running read"
    slow.thaw()
    assert ended.get(timeout=WAIT_S).state is PullState.DONE
    assert_page(pool, 5, 9)
    wait_until_passed(agent, broken)
    for one in (peer, slow):
        one.stop()


def test_an_agent_is_not_replaced_often(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    """Reads go on at once all the same; the pages come back with the next replacement."""
    peer = Peer()
    agent.add_peer(peer.description)
    first = fail_a_read(agent, peer, monkeypatch)
    agent.add_peer(peer.description)
    wait_until_passed(agent, first)
    monkeypatch.setattr(endpoints, "REPLACE_EVERY_S", math.inf)
    second = fail_a_read(agent, peer, monkeypatch)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    assert_page(pool, 2, 7)
    assert not second.passed()
    monkeypatch.setattr(endpoints, "REPLACE_EVERY_S", 0.0)
    wait_until_passed(agent, second)
    peer.stop()


def test_a_break_connects_anew_to_those_that_nothing_was_read_from(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    """Their connections may have broken, too, and would cost a read each."""
    monkeypatch.setattr(Endpoints, "replace", lambda endpoints: False)
    peer, other = Peer(), Peer()
    for one in (peer, other):
        agent.add_peer(one.description)
        assert read(agent, one, [1], [1]).state is PullState.DONE
    fail_a_read(agent, peer, monkeypatch)
    connected: list[str] = []
    connect = NixlEndpoint.connect

    def record(endpoint: NixlEndpoint, description: PeerDescription) -> None:
        connected.append(description.incarnation)
        connect(endpoint, description)

    monkeypatch.setattr(NixlEndpoint, "connect", record)
    agent.add_peer(peer.description)
    for one in (peer, other):
        assert read(agent, one, [2], [7]).state is PullState.DONE
    assert connected == [one.description.incarnation for one in (peer, other)]
    for one in (peer, other):
        one.stop()


def raise_at_first(endpoint: NixlEndpoint, tries: int) -> None:
    if tries < 2:
        raise RuntimeError("NIXL_ERR_BACKEND")


def hold_at_first(endpoint: NixlEndpoint, tries: int, held: list[Any]) -> None:
    """Refer to NIXL's agent once more, for the first tries."""
    if tries < 2:
        held[:] = held or [endpoint._agent.agent]
    else:
        held.clear()


@pytest.mark.parametrize("reason", ["NIXL fails", "something refers to it"])
def test_an_agent_that_cannot_be_destroyed_at_once_is_destroyed_later(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool, reason: str
) -> None:
    monkeypatch.setattr(peers, "TRY_AGAIN_S", 0.0)
    peer = Peer()
    agent.add_peer(peer.description)
    broken = fail_a_read(agent, peer, monkeypatch)
    destroy, passed, held = NixlEndpoint.destroy, [], list[Any]()

    def destroy_late(endpoint: NixlEndpoint) -> bool:
        passed.append(broken.passed())
        if reason == "NIXL fails":
            raise_at_first(endpoint, len(passed) - 1)
        else:
            hold_at_first(endpoint, len(passed) - 1, held)
        return destroy(endpoint)

    monkeypatch.setattr(NixlEndpoint, "destroy", destroy_late)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    wait_until_passed(agent, broken)
    assert passed == [False] * 3
    peer.stop()


def test_a_death_waits_until_the_agent_that_read_is_destroyed(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often that fails."""
    monkeypatch.setattr(peers, "TRY_AGAIN_S", 0.0)
    peer, other = Peer(), Peer()
    for one in (peer, other):
        agent.add_peer(one.description)
    broken = fail_a_read(agent, peer, monkeypatch)
    lets_go, destroy = threading.Event(), NixlEndpoint.destroy
    refused: list[NixlEndpoint] = []

    def destroy_late(endpoint: NixlEndpoint) -> bool:
        if lets_go.is_set():
            return destroy(endpoint)
        refused.append(endpoint)
        return False

    monkeypatch.setattr(NixlEndpoint, "destroy", destroy_late)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [7]).state is PullState.DONE
    peer.kill()
    agent.confirm_death(peer.description.incarnation)
    while len(refused) < 3:
        assert not broken.passed()
        wait_for_a_pass(agent)
    assert not broken.passed()
    assert read(agent, other, [1], [1]).state is PullState.DONE, "the thread lives"
    lets_go.set()
    wait_until_passed(agent, broken)
    other.stop()


def test_a_dead_peer_that_nixl_cannot_forget_is_forgotten_later(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TRY_AGAIN_S", 0.0)
    peer, other = Peer(), Peer()
    for one in (peer, other):
        agent.add_peer(one.description)
    disconnect, tried = NixlEndpoint.disconnect, list[str]()

    def fail_at_first(endpoint: NixlEndpoint, name: str) -> None:
        tried.append(name)
        raise_at_first(endpoint, len(tried) - 1)
        disconnect(endpoint, name)

    monkeypatch.setattr(NixlEndpoint, "disconnect", fail_at_first)
    peer.kill()
    agent.confirm_death(peer.description.incarnation)
    while len(tried) < 3:
        wait_for_a_pass(agent)
    assert set(tried) == {peer.description.incarnation}
    assert read(agent, other, [1], [1]).state is PullState.DONE, "the thread lives"
    wait_for_a_pass(agent)
    assert len(tried) == 3
    other.stop()


@pytest.mark.parametrize("reads_first", [False, True])
def test_an_agent_that_peers_may_read_starts_no_read_and_stays(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool, reads_first: bool
) -> None:
    """A peer's read of what is not registered any more can kill this process.

    So it is another agent that reads, and that is replaced: no failed read keeps its pages.
    """
    peer, described = Peer(), queue.SimpleQueue[AgentDescription]()
    if not reads_first:
        agent.describe()
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    agent.make_readable(described.put)
    plain = described.get(timeout=WAIT_S)
    there = make_pool()
    borrower = TransferAgent(f"borrower-{time.monotonic_ns()}", [there], print)
    borrower.meet(agent.incarnation, plain)

    def borrow(page: int) -> None:
        ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
        borrower.pull(agent.incarnation, [np.array([5])], [np.array([page])], ended.put)
        assert ended.get(timeout=WAIT_S).state is PullState.DONE
        assert_page(there, 5, page)

    borrow(1)
    broken = fail_a_read(agent, peer, monkeypatch)
    agent.add_peer(peer.description)
    assert read(agent, peer, [2], [2]).state is PullState.DONE
    wait_until_passed(agent, broken)
    assert agent.describe().plain() == plain
    borrow(2)
    peer.stop()
    borrower.close()


def test_an_agent_that_may_have_read_is_not_the_one_that_peers_may_read(
    agent: TransferAgent,
) -> None:
    """Also when it knows no peer just then: pages of failed reads may wait for its end."""
    described = queue.SimpleQueue[AgentDescription]()
    assert not agent._endpoints.current.connected
    agent.make_readable(described.put)
    described.get(timeout=WAIT_S)
    assert agent._endpoints.readable is not agent._endpoints.current


def test_an_agent_that_registers_nothing_more_is_replaced(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL fails to once the agent's connection to itself has broken."""
    peer = Peer()
    agent.add_peer(peer.description)

    def refuse(endpoint: NixlEndpoint, memory: PoolLayout) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(NixlEndpoint, "register", refuse)
    landing = agent.make_landing(lambda: None)
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    agent.read_scratch(peer.description.incarnation, landing, ended.put)
    assert ended.get(timeout=WAIT_S).state is PullState.DONE
    peer.stop()


def test_a_dead_peer_whose_reads_go_on_for_ever_is_given_up(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch, pool: KVPool
) -> None:
    """NIXL does not notice that a peer has lost its lease while it is frozen."""
    monkeypatch.setattr(peers, "ENDS_BY_ITSELF_S", 0.1)
    frozen, other = Peer(), Peer()
    frozen.freeze()
    for one in (frozen, other):
        agent.add_peer(one.description)
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    pages = [np.arange(8)]
    pull = agent.pull(frozen.description.incarnation, pages, pages, ended.put)
    agent.confirm_death(frozen.description.incarnation)
    assert ended.get(timeout=WAIT_S) is pull
    assert pull.state is PullState.FAILED
    wait_until_passed(agent, pull)
    assert read(agent, other, [2], [7]).state is PullState.DONE
    assert_page(pool, 2, 7)
    frozen.kill()
    other.stop()
