"""The decode side's end of hand-over streams: carried on the event loop, used by the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from kvrelay.decode_worker.wire import from_wire, peer_from_wire, to_wire
from kvrelay.engine.commands import Inbox, Peer
from kvrelay.engine.outbox import MessageStream
from kvrelay.engine.outputs import Cause, RequestKey
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.attestation import Attestation, Prober
from kvrelay.kv_transfer.errors import PeerRefusedError, TransferError, TransferRefusedError
from kvrelay.kv_transfer.hand_over import FromDecode, FromPrefill, Said, Words
from kvrelay.net.ends import worker_channel
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 10.0
"""For a prefill worker's first answer; nothing is held for it yet."""
REFUSAL_S = 10.0
"""Between measurements of a prefill worker that is refused: it may have been disturbed."""
DEATH_SHOWS_S = 0.5
"""In the connection, after NIXL has failed to read from the peer."""
CLOSE_GRACE_S = 5.0
"""For what still goes on in a channel that broke."""


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
    """Nothing is read from a prefill worker for now."""

    why: str
    remeasuring: asyncio.Task[None]


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
        self._prober = Prober(agent, min_gbps)
        self._refusals: dict[str, _Refusal] = {}
        self._peers: dict[str, asyncio.Task[grpc.aio.Channel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, stream: HandOverStream) -> None:
        """Open `stream` and carry it to its end."""
        self._spawn(self._carry(stream))

    async def forget(self, incarnation: str) -> None:
        """Drop what was known of a worker that died; those who wait for it wait no more."""
        self._prober.forget(incarnation)
        refusal = self._refusals.pop(incarnation, None)
        if refusal is not None:
            refusal.remeasuring.cancel()
        reached = self._peers.pop(incarnation, None)
        if reached is not None:
            reached.cancel()
            await _close(reached, None)

    async def close(self) -> None:
        """End every stream and every channel."""
        while tasks := [task for task in (*self._tasks, *self._peers.values()) if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for incarnation in list(self._peers):
            await self.forget(incarnation)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry(self, stream: HandOverStream) -> None:
        detail, cause = "the stream ended", Cause.PEER_LOST
        try:
            reached = self._reach(stream.peer)
            channel = await asyncio.shield(reached)
            try:
                await self._talk(hand_over_pb2_grpc.HandOverServiceStub(channel), stream)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self._disconnected(stream.peer, reached)
                raise
        except TransferRefusedError as error:
            detail, cause = str(error), Cause.TRANSFER_REFUSED
        except TransferError as error:
            detail, cause = str(error), Cause.PROTOCOL_ERROR
        except grpc.RpcError as error:
            detail = _status_of(error)
        except TimeoutError:
            detail = f"it has not answered for {REACH_TIMEOUT_S:g} s"
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

    def _reach(self, peer: Peer) -> asyncio.Task[grpc.aio.Channel]:
        """A channel to a prefill worker whose pool can be read; introduced at first contact.

        Raises `TransferRefusedError` while the worker is refused.
        """
        refusal = self._refusals.get(peer.incarnation)
        if refusal is not None:
            raise TransferRefusedError(refusal.why)
        reached = self._peers.get(peer.incarnation)
        if reached is None:
            reached = asyncio.create_task(self._introduce(peer))
            self._peers[peer.incarnation] = reached
            reached.add_done_callback(lambda done: self._drop_failed(peer, done))
        return reached

    def _drop_failed(self, peer: Peer, done: asyncio.Task[grpc.aio.Channel]) -> None:
        """Its next request tries again."""
        failed = done.cancelled() or done.exception() is not None
        if failed and self._peers.get(peer.incarnation) is done:
            del self._peers[peer.incarnation]

    def _disconnected(self, peer: Peer, reached: asyncio.Task[grpc.aio.Channel]) -> None:
        """When it can be reached again that may be by another path: it is measured anew."""
        if self._peers.get(peer.incarnation) is reached:
            del self._peers[peer.incarnation]
            self._spawn(_close(reached, CLOSE_GRACE_S))

    async def _introduce(self, peer: Peer) -> grpc.aio.Channel:
        channel = worker_channel(peer.address, self._credentials)
        try:
            found = await self._measure(peer, channel)
            if found.refusal:
                logger.error("a prefill worker is refused: %s", found.refusal)
                remeasuring = self._spawn(self._remeasure(peer))
                self._refusals[peer.incarnation] = _Refusal(found.refusal, remeasuring)
            self._inbox.post(PeerAttested(found))
            if found.refusal:
                raise TransferRefusedError(found.refusal)
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _remeasure(self, peer: Peer) -> None:
        """Until it is refused no more. No request has to fail to find that out."""
        found = None
        while found is None or found.refusal:
            await asyncio.sleep(REFUSAL_S)
            try:
                async with worker_channel(peer.address, self._credentials) as channel:
                    found = await self._measure(peer, channel)
            except (TransferError, TimeoutError, grpc.RpcError) as error:
                logger.info("%s could not be measured again: %s", peer.incarnation, error)
            except Exception:
                logger.exception("%s could not be measured again", peer.incarnation)
            else:
                if not found.refusal:
                    del self._refusals[peer.incarnation]
                self._inbox.post(PeerAttested(found))
        logger.warning("a prefill worker is refused no more: %s is read at %s", found.peer, found)

    async def _measure(self, peer: Peer, channel: grpc.aio.Channel) -> Attestation:
        """Learn how its pool is read, and how fast it can be.

        Raises:
            TransferError: what it says makes no sense.
            grpc.RpcError: it cannot be reached, or dies meanwhile.
            TimeoutError: it does not answer.
        """
        stub = hand_over_pb2_grpc.HandOverServiceStub(channel)
        call = stub.DescribeAgent(hand_over_pb2.DescribeAgentRequest(incarnation=peer.incarnation))
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise TransferError(f"{peer.incarnation} has not said how it is read")
            described = peer_from_wire(answer)
            described.check(peer.incarnation, self._agent.layouts)
            self._agent.add_peer(described)
            return await self._probe(peer, call)
        except PeerRefusedError as error:
            return Attestation(peer.incarnation, refusal=str(error))
        finally:
            call.cancel()

    async def _probe(self, peer: Peer, call: grpc.aio.UnaryStreamCall) -> Attestation:
        """Measure while the call lives, which ends early only with the peer, or the connection."""
        measuring = asyncio.create_task(self._prober.measure(peer.incarnation))
        ended = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({measuring, ended}, return_when=asyncio.FIRST_COMPLETED)
            if measuring.done() and measuring.result().refusal:
                # NIXL may be the first to notice that the peer has died.
                await asyncio.wait({ended}, timeout=DEATH_SHOWS_S)
            if ended.done():
                ended.result()
                raise TransferError(f"{peer.incarnation} does not wait to be measured")
            return await measuring
        finally:
            for task in (measuring, ended):
                task.cancel()
            await asyncio.gather(measuring, ended, return_exceptions=True)


async def _close(reached: asyncio.Task[grpc.aio.Channel], grace: float | None) -> None:
    """Once what still goes on there has ended, or after so many seconds; None: at once."""
    await asyncio.wait([reached])
    if not reached.cancelled() and reached.exception() is None:
        await reached.result().close(grace)


def _status_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
