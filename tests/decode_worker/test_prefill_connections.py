"""A decode worker meets a prefill worker: real NIXL and gRPC, the engines left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import torch

from kvrelay.decode_worker import refused_peers
from kvrelay.decode_worker.hand_over_client import HandOverClient
from kvrelay.decode_worker.hand_over_stream import (
    CloseStream,
    ConnectAnew,
    HandOverStream,
    OpenStream,
    PeerProbed,
    StreamLost,
)
from kvrelay.engine.scheduler.commands import Inbox, Misdirected
from kvrelay.kv_transfer import scratch_pages
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.nixl_endpoint import NixlTransfer
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.prefill_worker.hand_over_service import HandOverService
from kvrelay.prefill_worker.request import StreamMessage, StreamOpened
from kvrelay.v1 import hand_over_pb2_grpc
from kvrelay.wire.hand_over import Heartbeat
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.output import FailureReason
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerAddress
from tests.ports import free_port

WAIT_S = 30
MessageT = TypeVar("MessageT")


def make_agent(name: str) -> TransferAgent:
    geometry = KVGeometry(4, 2, 32, torch.float32, 16)
    pool = KVPool(geometry, 8, torch.device("cpu"))
    return TransferAgent(f"{name}-{time.monotonic_ns()}", [pool], print)


@dataclass
class Prefill:
    """A prefill worker without an engine."""

    peer: WorkerAddress
    inbox: ReadInbox
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


@asynccontextmanager
async def prefill_worker(name: str = "prefill") -> AsyncIterator[Prefill]:
    agent, inbox = make_agent(name), ReadInbox()
    peer = WorkerAddress(f"127.0.0.1:{free_port()}", agent.incarnation)
    prefill = Prefill(peer, inbox, grpc.aio.server(), HandOverService(agent, inbox), agent)
    await prefill.serve()
    yield prefill
    await prefill.server.stop(None)
    agent.close()


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    async with prefill_worker() as prefill:
        yield prefill


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    agent = make_agent("decode")
    yield agent
    agent.close()


class ReadInbox(Inbox[Any]):
    """An inbox that is read here, in place of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self._read: list[object] = []

    def unread(self) -> list[object]:
        """What was posted and not yet returned by `next`."""
        self.post(None)  # `take_all` waits if there is nothing
        self._read += self.take_all()
        self._read.remove(None)
        return self._read

    async def next(self, kind: type[MessageT]) -> MessageT:
        """The next message of a kind. Those before it are dropped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                unread = self.unread()
                for index, message in enumerate(unread):
                    if isinstance(message, kind):
                        del unread[: index + 1]
                        return message
                unread.clear()
                await asyncio.sleep(0.005)


async def until_serving(agent: TransferAgent, number: int) -> None:
    """Wait until so many requests may be read from the agent's pool."""
    async with asyncio.timeout(WAIT_S):
        while agent.num_serving != number:
            await asyncio.sleep(0.005)


def make_client(
    agent: TransferAgent, inbox: Inbox[Any], prober: TransportProber | None = None
) -> HandOverClient:
    prober = prober or TransportProber(agent, 0.0)
    return HandOverClient(agent, prober, inbox, vocab_size=100, credentials=None)


def stream_to(peer: WorkerAddress, number: int = 0) -> HandOverStream:
    return HandOverStream(RequestKey("router", f"request-{number}", 1), peer)


async def test_a_pair_is_measured_when_it_meets(prefill: Prefill, agent: TransferAgent) -> None:
    for _ in range(3):  # on a busy machine UCX may lose the connection that it makes
        inbox = ReadInbox()
        client = make_client(agent, inbox)
        client.deliver(OpenStream(stream_to(prefill.peer)))
        met = await inbox.next(PeerProbed)
        if not met.transport.refusal:
            break
        await client.close()
    assert met.transport.incarnation == prefill.peer.incarnation
    assert met.transport.read_bytes_per_second > 0
    await prefill.inbox.next(StreamOpened)
    await until_serving(prefill.agent, 0)
    client.deliver(OpenStream(stream_to(prefill.peer, 1)))
    await prefill.inbox.next(StreamOpened)
    assert not any(isinstance(message, PeerProbed) for message in inbox.unread()), "once"
    await client.close()


async def test_a_pair_whose_connection_broke_is_measured_again(
    prefill: Prefill, agent: TransferAgent
) -> None:
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    await inbox.next(PeerProbed)
    await prefill.inbox.next(StreamOpened)
    await prefill.disconnect()
    assert (await inbox.next(StreamLost)).cause is FailureReason.PEER_LOST
    client.deliver(OpenStream(stream_to(prefill.peer, 1)))
    again = await inbox.next(PeerProbed)
    assert again.transport.incarnation == prefill.peer.incarnation
    await client.close()


async def test_a_pair_whose_read_failed_is_measured_again(
    prefill: Prefill, agent: TransferAgent
) -> None:
    """As a rule the connection of gRPC lives on: it is another one."""
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    failing, other = stream_to(prefill.peer), stream_to(prefill.peer, 1)
    client.deliver(OpenStream(failing))
    client.deliver(OpenStream(other))
    await inbox.next(PeerProbed)
    for _ in range(2):
        await prefill.inbox.next(StreamOpened)
    failing.deliver(CloseStream(unreadable=True))
    assert (await inbox.next(StreamLost)).stream is failing
    client.deliver(OpenStream(stream_to(prefill.peer, 2)))
    await inbox.next(PeerProbed)
    await prefill.inbox.next(StreamOpened)
    other.deliver(other.sequencer.number(Heartbeat()))
    await prefill.inbox.next(StreamMessage)
    assert not any(isinstance(message, StreamLost) for message in inbox.unread())
    await client.close()


async def test_a_read_that_failed_after_its_request_connects_anew_at_once(
    prefill: Prefill, agent: TransferAgent
) -> None:
    """Its pages come back with the new connection, whether or not a request comes."""
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    stream = stream_to(prefill.peer)
    client.deliver(OpenStream(stream))
    await inbox.next(PeerProbed)
    await prefill.inbox.next(StreamOpened)
    stream.deliver(CloseStream())
    await inbox.next(StreamLost)
    await until_serving(prefill.agent, 0)
    for _ in range(2):
        client.deliver(ConnectAnew(prefill.peer))
    assert not (await inbox.next(PeerProbed)).transport.refusal
    await until_serving(prefill.agent, 0)
    assert not inbox.unread(), "one handshake for both"
    await client.close()


async def test_pages_of_a_failed_read_come_back_though_the_peer_answers_no_more(
    prefill: Prefill, agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is connected to it by gRPC then, and no handshake would end."""
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    await prefill.inbox.next(StreamOpened)
    pull = await read_that_fails(agent, prefill.peer.incarnation, monkeypatch)
    await prefill.server.stop(None)
    await inbox.next(StreamLost)
    assert not client.known_peers
    assert not pull.passed()
    client.deliver(ConnectAnew(prefill.peer))
    async with asyncio.timeout(WAIT_S):
        while not pull.passed():
            agent.report_alive(lambda: None)
            await asyncio.sleep(0.005)
    await client.close()


async def read_that_fails(agent: TransferAgent, peer: str, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """NIXL reports a failure of a peer that lives."""
    ended = asyncio.Event()
    loop, page = asyncio.get_running_loop(), np.array([1])

    def end(_: Pull) -> None:
        loop.call_soon_threadsafe(ended.set)

    with monkeypatch.context() as patch:
        patch.setattr(NixlTransfer, "start", lambda transfer: "ERR")
        pull = agent.pull(peer, [page], [page], end)
        await asyncio.wait_for(ended.wait(), WAIT_S)
    assert pull.state is PullState.FAILED
    return pull


async def test_peers_whose_transfers_hang_keep_nobody_waiting(
    prefill: Prefill, agent: TransferAgent
) -> None:
    """They answer by gRPC, and not by NIXL."""
    inbox, begun = ReadInbox(), asyncio.Queue[str]()

    class Prober(TransportProber):
        async def measure(self, peer: str, host_pages: int = 0) -> PeerTransport:
            begun.put_nowait(peer)
            return await super().measure(peer, host_pages)

    client = make_client(agent, inbox, Prober(agent, 0.0))
    async with AsyncExitStack() as workers:
        waiting = []
        for number in range(2):
            stuck = await workers.enter_async_context(prefill_worker(f"stuck-{number}"))
            stuck.agent.close()
            waiting.append(stream_to(stuck.peer, number))
            client.deliver(OpenStream(waiting[-1]))
            assert await asyncio.wait_for(begun.get(), WAIT_S) == stuck.peer.incarnation
        served = stream_to(prefill.peer, 2)
        client.deliver(OpenStream(served))
        met = await inbox.next(PeerProbed)
        assert (met.transport.incarnation, met.transport.refusal) == (served.peer.incarnation, "")
        await prefill.inbox.next(StreamOpened)
        assert [stream.is_open for stream in (*waiting, served)] == [False, False, True]
        for stream in waiting:
            await client.forget_peer(stream.peer.incarnation)
        await client.close()


async def test_a_pair_below_the_floor_is_refused_until_it_is_faster(
    prefill: Prefill,
    agent: TransferAgent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(refused_peers, "MEASURE_AGAIN_S", 0.05)
    inbox = ReadInbox()
    prober = TransportProber(agent, 1e15)
    client = make_client(agent, inbox, prober)
    for number in range(3):
        client.deliver(OpenStream(stream_to(prefill.peer, number)))
        lost = await inbox.next(StreamLost)
        assert lost.cause is FailureReason.TRANSFER_REFUSED
        assert "asks for 1e+06" in lost.detail
    for _ in range(2):
        assert "asks for 1e+06" in (await inbox.next(PeerProbed)).transport.refusal
    refusals = [r for r in caplog.records if r.levelno == logging.ERROR and "refused" in r.message]
    assert len(refusals) == 1, "said once"
    prober.floor = 0.0
    while (await inbox.next(PeerProbed)).transport.refusal:
        pass
    client.deliver(OpenStream(stream_to(prefill.peer, 3)))
    await prefill.inbox.next(StreamOpened)
    await client.close()


async def test_a_pair_that_cannot_be_read_is_refused(
    prefill: Prefill, agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    monkeypatch.setattr(scratch_pages, "scratch_byte", lambda name, page, layer: 7)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    assert "other bytes" in (await inbox.next(PeerProbed)).transport.refusal
    lost = await inbox.next(StreamLost)
    assert (lost.cause, "other bytes" in lost.detail) == (FailureReason.TRANSFER_REFUSED, True)
    assert client.known_peers == {prefill.peer.incarnation}
    await client.forget_peer(prefill.peer.incarnation)
    assert not client.known_peers
    await client.close()
    assert not client.num_streams


async def test_a_peer_that_dies_while_it_is_measured_is_lost_not_slow(
    prefill: Prefill, agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = ReadInbox()
    prober = TransportProber(agent, 0.0)
    client = make_client(agent, inbox, prober)
    measured = asyncio.Event()
    ends: list[asyncio.Task[None]] = []

    async def measure(peer: str, host_pages: int) -> PeerTransport:
        await until_serving(prefill.agent, 1)
        measured.set()
        # A task of its own: a stop that is cancelled with the measurement could not be made again.
        ends.append(asyncio.create_task(prefill.server.stop(None)))
        await asyncio.shield(ends[0])
        return PeerTransport(peer, refusal="NIXL was the first to notice")

    monkeypatch.setattr(prober, "measure", measure)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    await asyncio.wait_for(measured.wait(), WAIT_S)
    assert (await inbox.next(StreamLost)).cause is FailureReason.PEER_LOST
    assert not client.known_peers
    assert not any(isinstance(message, PeerProbed) for message in inbox.unread())
    await client.close()
    await ends[0]


async def test_pages_that_do_not_fit_are_a_refusal(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KVPool(KVGeometry(4, 2, 32, torch.float32, 8), 8, torch.device("cpu"))
    agent = TransferAgent(f"decode-{time.monotonic_ns()}", [other], print)
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    assert "do not fit" in (await inbox.next(PeerProbed)).transport.refusal
    assert (await inbox.next(StreamLost)).cause is FailureReason.TRANSFER_REFUSED
    await client.close()
    agent.close()


async def test_pages_of_another_model_are_a_refusal(prefill: Prefill) -> None:
    """Their geometry is the same, so nothing else would tell."""
    pool = KVPool(KVGeometry(4, 2, 32, torch.float32, 16), 8, torch.device("cpu"))
    trained = replace(prefill.agent.model, weights="7e" * 32)
    agent = TransferAgent(f"decode-{time.monotonic_ns()}", [pool], print, trained)
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    client.deliver(OpenStream(stream_to(prefill.peer)))
    refusal = (await inbox.next(PeerProbed)).transport.refusal
    assert refusal == (
        f"{prefill.peer.incarnation} has loaded model {prefill.agent.model.name}, not "
        f"{trained.name} as this worker has: weights (none, not 7e7e7e7e7e7e)"
    )
    assert (await inbox.next(StreamLost)).cause is FailureReason.TRANSFER_REFUSED
    assert not any(isinstance(message, StreamOpened) for message in prefill.inbox.unread())
    await client.close()
    agent.close()


async def test_another_life_of_a_worker_is_another_worker(
    prefill: Prefill, agent: TransferAgent
) -> None:
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    client.deliver(
        OpenStream(stream_to(WorkerAddress(prefill.peer.address, "prefill-of-yesterday")))
    )
    lost = await inbox.next(StreamLost)
    assert (lost.cause, "not prefill-of-yesterday" in lost.detail) == (
        FailureReason.PEER_LOST,
        True,
    )
    assert isinstance(await prefill.inbox.next(Misdirected), Misdirected)
    await client.close()


async def test_a_stream_that_comes_while_the_client_closes_is_lost(
    prefill: Prefill, agent: TransferAgent
) -> None:
    """The engine runs a little longer than the event loop's side of the worker."""
    inbox = ReadInbox()
    client = make_client(agent, inbox)
    await client.close()
    late = stream_to(prefill.peer)
    client.deliver(OpenStream(late))
    assert (await inbox.next(StreamLost)).stream is late
    assert client.num_streams == 0
