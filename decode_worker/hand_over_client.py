"""The client of prefill workers: opens hand-over streams and carries their messages."""

from __future__ import annotations

import asyncio
import time

import grpc

from kvrelay.decode_worker.hand_over_stream import (
    ConnectAnew,
    HandOverStream,
    OpenStream,
    PeerMessage,
    PeerProbed,
    StreamLost,
)
from kvrelay.decode_worker.handshake import ANSWER_TIMEOUT_S, Handshake
from kvrelay.decode_worker.prefill_connections import PrefillConnections
from kvrelay.engine.scheduler.commands import Mailbox
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import ProtocolError, TransferError, TransferRefusedError
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.net.tls import CurrentTls
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc
from kvrelay.wire.hand_over import Announce, FromPrefill, Open, Sequenced
from kvrelay.wire.messages import FROM_DECODE, FROM_PREFILL, HAND_OVER_OPEN
from kvrelay.wire.output import FailureReason


class HandOverClient:
    """A sink of streams to open, and of peers to connect anew.

    Args:
        agent: is given the description of each prefill worker before the first stream to it.
        prober: measures each prefill worker before the first stream to it.
        inbox: the engine's.
        vocab_size: of the model; a first token beyond it ends its stream.
        credentials: for prefill workers; None: plain text.
    """

    def __init__(
        self,
        agent: TransferAgent,
        prober: TransportProber,
        inbox: Mailbox[PeerMessage | StreamLost | PeerProbed],
        vocab_size: int,
        credentials: CurrentTls | None,
    ) -> None:
        self._agent = agent
        self._inbox = inbox
        self._vocab_size = vocab_size
        self._connections = PrefillConnections(
            Handshake(agent, prober), lambda found: inbox.post(PeerProbed(found)), credentials
        )
        self._carriers: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def num_streams(self) -> int:
        """The number of streams that are carried now."""
        return len(self._carriers)

    @property
    def known_peers(self) -> set[str]:
        """The incarnations of the prefill workers that are connected, or refused."""
        return self._connections.incarnations

    def deliver(self, command: OpenStream | ConnectAnew) -> None:
        """Open a stream and carry it to its end, in a task of its own; opens none while closing."""
        if isinstance(command, ConnectAnew):
            if not self._closing:
                # The agent needs no answer of the peer to let the fences of failed reads pass.
                self._agent.reconnect(command.peer.incarnation)
                self._connections.connect_anew(command.peer)
            return
        if self._closing:
            lost = StreamLost(command.stream, "the worker stops", FailureReason.PEER_LOST)
            self._inbox.post(lost)
            return
        carrier = asyncio.create_task(self._carry(command.stream))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def forget_peer(self, incarnation: str) -> None:
        """Disconnect from a prefill worker that died, which ends the streams to it."""
        await self._connections.forget(incarnation)

    async def close(self) -> None:
        """End every stream and close every connection. Later commands are lost."""
        self._closing = True
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)
        await self._connections.close()

    async def _carry(self, stream: HandOverStream) -> None:
        detail, cause = "the stream ended", FailureReason.PEER_LOST
        try:
            async with self._connections.channel_for(stream) as channel:
                await self._exchange(channel, stream)
        except TransferRefusedError as error:
            detail, cause = str(error), FailureReason.TRANSFER_REFUSED
        except TransferError as error:
            detail, cause = str(error), FailureReason.PROTOCOL_ERROR
        except grpc.RpcError as error:
            detail = _status_of(error)
        except TimeoutError:
            detail = f"it has not answered for {ANSWER_TIMEOUT_S:g} s"
        finally:
            self._inbox.post(StreamLost(stream, detail, cause))

    async def _exchange(self, channel: grpc.aio.Channel, stream: HandOverStream) -> None:
        """Carry messages both ways until either side ends."""
        stream.begin(time.monotonic())
        call = hand_over_pb2_grpc.HandOverServiceStub(channel).HandOver()
        await call.write(self._open_message(stream))
        reader = asyncio.create_task(self._receive(call, stream))
        try:
            async for message in stream:
                await call.write(FROM_DECODE.to_message(message))
        except asyncio.InvalidStateError:
            pass  # the call has ended meanwhile; the reader knows how
        finally:
            call.cancel()
            ended = (await asyncio.gather(reader, return_exceptions=True))[0]
        if isinstance(ended, TransferError | grpc.RpcError):
            raise ended

    async def _receive(self, call: grpc.aio.StreamStreamCall, stream: HandOverStream) -> None:
        try:
            async for message in call:
                self._inbox.post(PeerMessage(stream, read_message(message, self._vocab_size)))
        finally:
            stream.close()

    def _open_message(self, stream: HandOverStream) -> hand_over_pb2.HandOverRequest:
        opened = Open(stream.key, stream.peer.incarnation, self._agent.incarnation)
        return hand_over_pb2.HandOverRequest(open=HAND_OVER_OPEN.to_message(opened))


def read_message(
    message: hand_over_pb2.HandOverResponse, vocab_size: int
) -> Sequenced[FromPrefill]:
    """Read one message of a prefill worker, and check it.

    Raises:
        ProtocolError: this side does not know the message, or a token is of another vocabulary.
    """
    try:
        sequenced = FROM_PREFILL.from_message(message)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if isinstance(sequenced.message, Announce):
        for token in sequenced.message.first_tokens:
            if token.token_id >= vocab_size:
                raise ProtocolError(f"first token {token.token_id} of a vocabulary of {vocab_size}")
    return sequenced


def _status_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
