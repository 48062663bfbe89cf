"""The probe of the transport from a peer: real NIXL between two processes."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.nixl_endpoint import NixlTransfer
from kvrelay.kv_transfer.pull import PullState
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import PAGES, WAIT_S, Peer, assert_page, read


async def test_a_probe_that_failed_is_made_again(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    with monkeypatch.context() as patch:
        patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
        assert "ended as ERR" in (await prober.measure(name)).refusal
    agent.add_peer(peer.description)
    assert not (await prober.measure(name)).refusal
    peer.stop()


@pytest.mark.parametrize("order", list(PageOrder))
async def test_a_probe_measures_scratch_pages_and_touches_no_others(
    agent: TransferAgent, order: PageOrder, pool: KVPool
) -> None:
    peer = Peer(order)
    agent.add_peer(peer.description)
    found = await TransportProber(agent, floor=0.0).measure(peer.description.incarnation)
    assert (found.incarnation, found.backend) == (peer.description.incarnation, "UCX")
    assert 1e6 < found.read_bytes_per_second < 1e12
    assert 1e6 < found.write_bytes_per_second < 1e12
    assert not found.refusal
    assert all((pool.layer(layer) == 0).all() for layer in range(4))
    pull = read(agent, peer, list(range(PAGES)), list(range(PAGES)))
    assert pull.state is PullState.DONE
    for page in range(PAGES):
        assert_page(pool, page, page)
    asked_too_much = await TransportProber(agent, floor=1e15).measure(peer.description.incarnation)
    assert asked_too_much.refusal.endswith("asks for 1e+06")
    peer.stop()


async def test_a_peer_that_does_not_answer_is_refused_and_left_alone_until_it_does(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.kv_transfer.transport_probe.PROBE_TIMEOUT_S", 0.3)
    prober = TransportProber(agent, floor=0.0)
    assert "is not known" in (await prober.measure("nobody")).refusal
    silent, other = Peer(), Peer()
    name = silent.description.incarnation
    silent.freeze()
    for peer in (silent, other):
        agent.add_peer(peer.description)
    assert (await prober.measure(name)).refusal == f"{name} was not read in 0.3 s"
    assert "an earlier probe has not ended" in (await prober.measure(name)).refusal
    assert not (await prober.measure(other.description.incarnation)).refusal
    silent.thaw()
    async with asyncio.timeout(WAIT_S):
        while (await prober.measure(name)).refusal:
            await asyncio.sleep(0.05)
    for peer in (silent, other):
        peer.stop()


async def test_a_probe_sees_other_bytes(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    monkeypatch.setattr("kvrelay.kv_transfer.scratch.scratch_byte", lambda name, page, layer: 7)
    found = await TransportProber(agent, floor=0.0).measure(peer.description.incarnation)
    assert "other bytes than it has" in found.refusal
    peer.stop()
