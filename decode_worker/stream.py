"""The decode side's end of hand-over streams: carried on the event loop, used by the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import grpc

from kvrelay.decode_worker.wire import from_wire, peer_from_wire, to_wire
from kvrelay.engine.commands import Inbox, Peer
from kvrelay.engine.outbox import MessageStream
from kvrelay.engine.outputs import Cause, RequestKey
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.attestation import Attestation, attest
from kvrelay.kv_transfer.errors import TransferError, TransferRefusedError
from kvrelay.kv_transfer.hand_over import FromDecode, FromPrefill, Said, Words
from kvrelay.net.ends import worker_channel
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 10.0
"""For a prefill worker's first answer; nothing is held for it yet."""
REFUSAL_S = 10.0
"""Until a prefill worker that was refused is measured again: it may have been disturbed."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the stream: the prefill side may let go of the pages."""


class HandOverStream(MessageStream[Said[FromDecode]]):
    """One request's hand-over stream, as the decode side holds it."""

    def __init__(self, key: RequestKey, peer: Peer) -> None:
        super().__init__()
        self.key = key
        self.peer = peer
        self.words = Words(time.monotonic())

    def deliver(self, message: Said[FromDecode] | Leave) -> None:
        """See `Sink`."""
        if isinstance(message, Leave):
            self.close()
        else:
            super().deliver(message)


@dataclass(frozen=True, slots=True)
class FromPeer:
    """The prefill worker says something."""

    stream: HandOverStream
    said: Said[FromPrefill]


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream has ended: the lease on the prefill side is gone."""

    stream: HandOverStream
    detail: str
    cause: Cause = Cause.PEER_LOST


@dataclass(frozen=True, slots=True)
class PeerAttested:
    """The transport from a prefill worker was measured; it may be refused for that."""

    attestation: Attestation


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A pair that does not read from each other for now."""

    until: float
    error: TransferRefusedError


class HandOverClient:
    """Opens and carries hand-over streams. A sink of streams to open.

    Args:
        agent: learns to read each prefill worker's pool before the first stream to it.
        inbox: the engine's.
        vocab_size: of the model; a first token beyond it ends its stream.
        min_gbps: a prefill worker that can be read at less is refused.
        credentials: for prefill workers; None: plain text.
    """

    def __init__(
        self,
        agent: TransferAgent,
        inbox: Inbox,
        vocab_size: int,
        min_gbps: float,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self._agent = agent
        self._inbox = inbox
        self._vocab_size = vocab_size
        self._credentials = credentials
        self._min_gbps = min_gbps
        self._refusals: dict[str, _Refusal] = {}
        self._attesting = asyncio.Lock()
        self._peers: dict[str, asyncio.Task[grpc.aio.Channel]] = {}
        self._carriers: set[asyncio.Task[None]] = set()

    def deliver(self, stream: HandOverStream) -> None:
        """Open `stream` and carry it to its end."""
        task = asyncio.create_task(self._carry(stream))
        self._carriers.add(task)
        task.add_done_callback(self._carriers.discard)

    async def forget(self, incarnation: str) -> None:
        """Drop what was known of a worker that died."""
        self._refusals.pop(incarnation, None)
        reached = self._peers.pop(incarnation, None)
        if reached is None:
            return
        try:
            channel = await reached
        except (TransferError, grpc.RpcError):
            return
        await channel.close()

    async def close(self) -> None:
        """End every stream and every channel."""
        for task in self._carriers:
            task.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)
        for incarnation in list(self._peers):
            await self.forget(incarnation)

    async def _carry(self, stream: HandOverStream) -> None:
        detail, cause = "the stream ended", Cause.PEER_LOST
        try:
            channel = await self._reach(stream.peer)
            await self._talk(hand_over_pb2_grpc.HandOverServiceStub(channel), stream)
        except TransferRefusedError as error:
            detail, cause = str(error), Cause.TRANSFER_REFUSED
        except TransferError as error:
            detail, cause = str(error), Cause.PROTOCOL_ERROR
        except grpc.RpcError as error:
            detail = _status_of(error)
        finally:
            self._inbox.post(StreamLost(stream, detail, cause))

    async def _talk(
        self, stub: hand_over_pb2_grpc.HandOverServiceStub, stream: HandOverStream
    ) -> None:
        """Carry messages both ways until either side ends."""
        call = stub.HandOver()
        await call.write(self._open_message(stream))
        reader = asyncio.create_task(self._read(call, stream))
        try:
            async for message in stream:
                await call.write(to_wire(message))
        except asyncio.InvalidStateError:
            pass  # the call has ended meanwhile; the reader knows how
        finally:
            call.cancel()
            ended = (await asyncio.gather(reader, return_exceptions=True))[0]
        if isinstance(ended, TransferError | grpc.RpcError):
            raise ended

    async def _read(self, call: grpc.aio.StreamStreamCall, stream: HandOverStream) -> None:
        try:
            async for message in call:
                self._inbox.post(FromPeer(stream, from_wire(message, self._vocab_size)))
        finally:
            stream.close()

    def _open_message(self, stream: HandOverStream) -> hand_over_pb2.HandOverRequest:
        opened = hand_over_pb2.HandOverOpen(
            router=stream.key.router,
            request_id=stream.key.request_id,
            attempt=stream.key.attempt,
            prefill_incarnation=stream.peer.incarnation,
            decode_incarnation=self._agent.incarnation,
        )
        return hand_over_pb2.HandOverRequest(open=opened)

    async def _reach(self, peer: Peer) -> grpc.aio.Channel:
        """A channel to a prefill worker whose pool can be read; introduced at first contact.

        A refusal stands for a while; then the pair is measured again.
        """
        refusal = self._refusals.get(peer.incarnation)
        if refusal is not None and time.monotonic() < refusal.until:
            raise refusal.error
        reached = self._peers.get(peer.incarnation)
        if reached is None:
            reached = asyncio.create_task(self._introduce(peer))
            self._peers[peer.incarnation] = reached
        try:
            return await asyncio.shield(reached)
        except Exception:
            if self._peers.get(peer.incarnation) is reached:
                del self._peers[peer.incarnation]
            raise

    async def _introduce(self, peer: Peer) -> grpc.aio.Channel:
        channel = worker_channel(peer.address, self._credentials)
        stub = hand_over_pb2_grpc.HandOverServiceStub(channel)
        request = hand_over_pb2.DescribeAgentRequest(incarnation=peer.incarnation)
        try:
            described = peer_from_wire(await stub.DescribeAgent(request, timeout=REACH_TIMEOUT_S))
            described.check(peer.incarnation, self._agent.layouts)
        except (TransferError, grpc.RpcError):
            await channel.close()
            raise
        self._agent.add_peer(described)
        try:
            await self._attest(peer)
        except TransferRefusedError as error:
            await channel.close()
            self._refuse(peer, error)
            raise
        return channel

    async def _attest(self, peer: Peer) -> None:
        try:
            async with self._attesting:
                found = await attest(self._agent, peer.incarnation, self._min_gbps)
        except TransferError as error:
            raise TransferRefusedError(str(error)) from error
        self._inbox.post(PeerAttested(found))
        if found.refused:
            floor = f"{self._min_gbps:g} GB/s are asked for"
            raise TransferRefusedError(f"{peer.incarnation} can be read at {found}; {floor}")

    def _refuse(self, peer: Peer, error: TransferRefusedError) -> None:
        level = logging.DEBUG if peer.incarnation in self._refusals else logging.ERROR
        logger.log(level, "a prefill worker is refused: %s", error)
        self._refusals[peer.incarnation] = _Refusal(time.monotonic() + REFUSAL_S, error)


def _status_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
