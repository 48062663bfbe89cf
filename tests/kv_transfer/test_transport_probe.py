"""The probe of the transport from a peer: real NIXL between two processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.endpoints import Endpoints
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint, NixlTransfer
from kvrelay.kv_transfer.probe_landing import LandingAreas
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.reads_from_peers import ReadsFromPeers
from kvrelay.kv_transfer.scratch_pages import make_landing
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import HOST_PAGES, PAGES, WAIT_S, Peer, assert_page, read


async def test_a_probe_that_failed_is_made_again(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    with monkeypatch.context() as patch:
        patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
        assert "ended as ERR" in (await prober.measure(name)).refusal
    for _ in range(3):  # on a busy machine UCX may lose the connection that it makes
        agent.add_peer(peer.description)
        if not (last := await prober.measure(name)).refusal:
            break
    assert not last.refusal
    peer.stop()


async def test_a_connection_that_broke_unnoticed_is_no_refusal(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    assert not (await prober.measure(name)).refusal
    start = NixlTransfer.start
    failed: list[NixlTransfer] = []

    def fail_once(transfer: NixlTransfer) -> str:
        if failed:
            return start(transfer)
        failed.append(transfer)
        return "ERR"

    monkeypatch.setattr(NixlTransfer, "start", fail_once)
    assert not (await prober.measure(name)).refusal
    assert failed
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


async def test_a_probe_reads_the_host_into_scratch_pages(
    agent: TransferAgent, pool: KVPool
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    assert not (await prober.measure(name)).host_bytes_per_second, "it is not told of a host"
    found = await prober.measure(name, HOST_PAGES)
    assert (found.refusal, found.host_refusal) == ("", "")
    assert 1e6 < found.host_bytes_per_second < 1e12
    assert all((pool.layer(layer) == 0).all() for layer in range(4))
    with prober._areas.lend(f"the host of {name}") as area:
        for page in range(HOST_PAGES):
            assert_page(area.pages, HOST_PAGES - 1 - page, PAGES + page)
    peer.stop()


@pytest.mark.parametrize("how", ["fails", "is not taken", "hangs"])
async def test_a_host_that_cannot_be_read_leaves_the_device_readable(
    agent: TransferAgent, pool: KVPool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    monkeypatch.setattr("kvrelay.kv_transfer.transport_probe.HOST_TIMEOUT_S", 0.2)
    start_probe, hosts = ReadsFromPeers.start_probe, list[Pull]()

    def start(reads: ReadsFromPeers, pull: Pull, *rest: Any) -> None:
        if not pull.from_host:
            start_probe(reads, pull, *rest)
            return
        hosts.append(pull)
        if how == "is not taken":
            pull.refuse("NIXL_ERR_NOT_FOUND")
            rest[-1](pull)
        elif how == "fails":
            with monkeypatch.context() as patch:
                patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
                start_probe(reads, pull, *rest)

    monkeypatch.setattr(ReadsFromPeers, "start_probe", start)
    found = await prober.measure(name, HOST_PAGES)
    assert (found.refusal, found.host_bytes_per_second) == ("", 0.0)
    assert found.read_bytes_per_second > 0
    says = {"fails": "ended as ERR", "hangs": "not read in 0.2 s"}
    assert says.get(how, "NIXL_ERR_NOT_FOUND") in found.host_refusal
    assert len(hosts) == 1
    again = await prober.measure(name, HOST_PAGES)
    assert (again.refusal, again.host_bytes_per_second) == ("", 0.0)
    assert again.read_bytes_per_second > 0
    pull = read(agent, peer, list(range(PAGES)), list(range(PAGES)))
    assert pull.state is PullState.DONE
    assert_page(pool, 3, 3)
    peer.stop()


async def test_a_peer_that_does_not_answer_is_refused_and_left_alone_until_it_does(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = TransportProber(agent, floor=0.0)
    assert "is not known" in (await prober.measure("nobody")).refusal
    silent, other = Peer(), Peer()
    name = silent.description.incarnation
    silent.freeze()
    for peer in (silent, other):
        agent.add_peer(peer.description)
    with monkeypatch.context() as patch:
        patch.setattr("kvrelay.kv_transfer.transport_probe.PROBE_TIMEOUT_S", 0.3)
        assert (await prober.measure(name)).refusal == f"{name} was not read in 0.3 s"
    assert "an earlier probe has not ended" in (await prober.measure(name)).refusal
    assert not (await prober.measure(other.description.incarnation)).refusal
    silent.thaw()
    async with asyncio.timeout(WAIT_S):
        while (await prober.measure(name)).refusal:
            await asyncio.sleep(0.05)
    for peer in (silent, other):
        peer.stop()


async def test_peers_that_hang_keep_nobody_from_being_measured(
    agent: TransferAgent, pool: KVPool
) -> None:
    stuck, healthy = [Peer(), Peer()], Peer()
    for peer in stuck:
        peer.freeze()
    prober = TransportProber(agent, floor=0.0)
    measuring = []
    for peer in [*stuck, healthy]:
        agent.add_peer(peer.description)
        name = peer.description.incarnation
        measuring.append(asyncio.create_task(prober.measure(name)))
    done, hanging = await asyncio.wait(measuring, return_when=asyncio.FIRST_COMPLETED)
    assert done == {measuring[-1]}
    assert not measuring[-1].result().refusal
    for task in hanging:
        task.cancel()
    for peer in [*stuck, healthy]:
        peer.stop()


async def test_a_peer_that_stops_while_it_is_timed_delays_others_by_one_turn(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.kv_transfer.transport_probe.TURN_S", 0.05)
    stops, other = Peer(), Peer()
    for peer in (stops, other):
        agent.add_peer(peer.description)
    prober, timed = TransportProber(agent, floor=0.0), asyncio.Event()

    def stop_instead(*_: object) -> Pull:
        stops.freeze()
        timed.set()
        return Pull("a move that does not end", (), ())

    with monkeypatch.context() as patch:
        patch.setattr(agent, "write_scratch", stop_instead)
        stuck = asyncio.create_task(prober.measure(stops.description.incarnation))
        await timed.wait()
    assert not (await prober.measure(other.description.incarnation)).refusal
    assert not stuck.done()
    stuck.cancel()
    for peer in (stops, other):
        peer.stop()


def test_an_area_that_bytes_may_come_to_is_lent_to_its_own_peer_alone(pool: KVPool) -> None:
    areas = LandingAreas(lambda on_refusal: make_landing(pool))
    with areas.lend("failing") as first:
        failed = Pull("failing", (), ())
        first.add(failed)
        failed.start(0)
        with pytest.raises(TransferError, match="has not ended yet"), areas.lend("failing"):
            pass
    with pytest.raises(TransferError, match="has not ended yet"), areas.lend("failing"):
        pass
    failed.fail("injected", 0.0)
    with areas.lend("failing") as again:
        assert again is first, "what still arrives is what this peer has there"
    with areas.lend("other") as second:
        assert second is not first
    failed.settle()
    with areas.lend("third") as third, areas.lend("fourth") as fourth:
        assert {third, fourth} == {first, second}


async def test_an_area_that_nixl_does_not_take_is_lent_once(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    prober, name = TransportProber(agent, floor=0.0), peer.description.incarnation
    reconnected: list[str] = []
    with monkeypatch.context() as patch:

        def refuse(endpoint: NixlEndpoint, memory: PoolLayout) -> None:
            raise RuntimeError("NIXL_ERR_BACKEND")

        patch.setattr(NixlEndpoint, "register", refuse)
        patch.setattr(Endpoints, "replace", lambda endpoints: False)
        patch.setattr(agent, "reconnect", reconnected.append)
        assert "no memory of this worker" in (await prober.measure(name)).refusal
    assert not reconnected, "the peer is not at fault"
    assert not (await prober.measure(name)).refusal
    peer.stop()


async def test_a_probe_sees_other_bytes(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    monkeypatch.setattr(
        "kvrelay.kv_transfer.scratch_pages.scratch_byte", lambda name, page, layer: 7
    )
    found = await TransportProber(agent, floor=0.0).measure(peer.description.incarnation)
    assert "other bytes than it has" in found.refusal
    peer.stop()
