"""A decode worker meets a prefill worker: real NIXL and gRPC, the engines left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import torch

from kvrelay.decode_worker import stream
from kvrelay.decode_worker.stream import (
    HandOverClient,
    HandOverStream,
    PeerAttested,
    StreamLost,
)
from kvrelay.engine.commands import Inbox, Misdirected, Peer
from kvrelay.engine.outputs import Cause, RequestKey
from kvrelay.kv_transfer import scratch
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.attestation import Attestation
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.prefill_worker.request import StreamOpened
from kvrelay.prefill_worker.service import HandOverService
from kvrelay.v1 import hand_over_pb2_grpc
from tests.chaos.cluster import free_port

WAIT_S = 30


def make_agent(name: str) -> TransferAgent:
    geometry = KVGeometry(4, 2, 32, torch.float32, 16)
    pool = KVPool(geometry, 8, torch.device("cpu"))
    return TransferAgent(f"{name}-{time.monotonic_ns()}", [pool], print)


@dataclass
class Prefill:
    """A prefill worker without an engine."""

    peer: Peer
    inbox: Inbox
    server: grpc.aio.Server
    service: HandOverService
    agent: TransferAgent

    async def serve(self) -> None:
        self.server = grpc.aio.server()
        hand_over_pb2_grpc.add_HandOverServiceServicer_to_server(self.service, self.server)
        self.server.add_insecure_port(self.peer.address)
        await self.server.start()

    async def disconnect(self) -> None:
        """The network fails under the streams, and comes back; the worker lives on."""
        await self.server.stop(None)
        await self.serve()


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    agent, inbox = make_agent("prefill"), Inbox()
    peer = Peer(f"127.0.0.1:{free_port()}", agent.incarnation)
    prefill = Prefill(peer, inbox, grpc.aio.server(), HandOverService(agent, inbox), agent)
    await prefill.serve()
    yield prefill
    await prefill.server.stop(None)
    agent.close()


@pytest.fixture
def agent() -> TransferAgent:
    agent = make_agent("decode")
    yield agent
    agent.close()


async def heard(inbox: Inbox, kind: type) -> object:
    """The next message of this kind."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for message in list(inbox._messages):
                inbox._messages.remove(message)
                if isinstance(message, kind):
                    return message
            await asyncio.sleep(0.005)


async def until_serving(agent: TransferAgent, number: int) -> None:
    """Until so many may read from it."""
    async with asyncio.timeout(WAIT_S):
        while agent._serving != number:
            await asyncio.sleep(0.005)


def stream_to(peer: Peer, number: int = 0) -> HandOverStream:
    return HandOverStream(RequestKey("router", f"request-{number}", 1), peer)


async def test_a_pair_is_measured_when_it_meets(prefill: Prefill, agent: TransferAgent):
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    client.deliver(stream_to(prefill.peer))
    met = await heard(inbox, PeerAttested)
    assert met.attestation.peer == prefill.peer.incarnation
    assert met.attestation.read_gbps > 0
    await heard(prefill.inbox, StreamOpened)
    await until_serving(prefill.agent, 0)
    client.deliver(stream_to(prefill.peer, 1))
    await heard(prefill.inbox, StreamOpened)
    assert not any(isinstance(message, PeerAttested) for message in inbox._messages), "once"
    await client.close()


async def test_a_pair_whose_connection_broke_is_measured_again(
    prefill: Prefill, agent: TransferAgent
):
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    client.deliver(stream_to(prefill.peer))
    await heard(inbox, PeerAttested)
    await heard(prefill.inbox, StreamOpened)
    await prefill.disconnect()
    assert (await heard(inbox, StreamLost)).cause is Cause.PEER_LOST
    client.deliver(stream_to(prefill.peer, 1))
    again = await heard(inbox, PeerAttested)
    assert again.attestation.peer == prefill.peer.incarnation
    await client.close()


async def test_a_pair_below_the_floor_is_refused_until_it_is_faster(
    prefill: Prefill, agent: TransferAgent, monkeypatch, caplog
):
    monkeypatch.setattr(stream, "REFUSAL_S", 0.05)
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=1e6, credentials=None)
    for number in range(3):
        client.deliver(stream_to(prefill.peer, number))
        lost = await heard(inbox, StreamLost)
        assert lost.cause is Cause.TRANSFER_REFUSED
        assert "1e+06 are asked for" in lost.detail
    for _ in range(2):
        assert "1e+06 are asked for" in (await heard(inbox, PeerAttested)).attestation.refusal
    refusals = [r for r in caplog.records if r.levelno == logging.ERROR and "refused" in r.message]
    assert len(refusals) == 1, "said once"
    monkeypatch.setattr(client._prober, "_floor", 0.0)
    while (await heard(inbox, PeerAttested)).attestation.refusal:
        pass
    client.deliver(stream_to(prefill.peer, 3))
    await heard(prefill.inbox, StreamOpened)
    await client.close()


async def test_a_pair_that_cannot_be_read_is_refused(
    prefill: Prefill, agent: TransferAgent, monkeypatch
):
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    monkeypatch.setattr(scratch, "_byte", lambda name, page, layer: 7)
    client.deliver(stream_to(prefill.peer))
    assert "other bytes" in (await heard(inbox, PeerAttested)).attestation.refusal
    lost = await heard(inbox, StreamLost)
    assert (lost.cause, "other bytes" in lost.detail) == (Cause.TRANSFER_REFUSED, True)
    await client.forget(prefill.peer.incarnation)
    assert not client._refusals
    assert not client._peers
    await client.close()
    assert not client._tasks


async def test_a_peer_that_dies_while_it_is_measured_is_lost_not_slow(
    prefill: Prefill, agent: TransferAgent, monkeypatch
):
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    measured = asyncio.Event()

    async def measure(peer: str) -> Attestation:
        await until_serving(prefill.agent, 1)
        measured.set()
        await prefill.server.stop(None)
        return Attestation(peer, refusal="NIXL was the first to notice")

    monkeypatch.setattr(client._prober, "measure", measure)
    client.deliver(stream_to(prefill.peer))
    await asyncio.wait_for(measured.wait(), WAIT_S)
    assert (await heard(inbox, StreamLost)).cause is Cause.PEER_LOST
    assert not client._refusals
    assert not any(isinstance(message, PeerAttested) for message in inbox._messages)
    await client.close()


async def test_pages_that_do_not_fit_are_a_refusal(prefill: Prefill, monkeypatch):
    other = KVPool(KVGeometry(4, 2, 32, torch.float32, 8), 8, torch.device("cpu"))
    agent = TransferAgent(f"decode-{time.monotonic_ns()}", [other], print)
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    client.deliver(stream_to(prefill.peer))
    assert "do not fit" in (await heard(inbox, PeerAttested)).attestation.refusal
    assert (await heard(inbox, StreamLost)).cause is Cause.TRANSFER_REFUSED
    await client.close()
    agent.close()


async def test_another_life_of_a_worker_is_another_worker(prefill: Prefill, agent: TransferAgent):
    inbox = Inbox()
    client = HandOverClient(agent, inbox, 100, min_gbps=0.0, credentials=None)
    client.deliver(stream_to(Peer(prefill.peer.address, "prefill-of-yesterday")))
    lost = await heard(inbox, StreamLost)
    assert (lost.cause, "not prefill-of-yesterday" in lost.detail) == (Cause.PEER_LOST, True)
    assert isinstance(await heard(prefill.inbox, Misdirected), Misdirected)
    await client.close()
