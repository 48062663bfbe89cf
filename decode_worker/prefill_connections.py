"""Connections to prefill workers: one to each, made by a handshake and shared by its streams.

A connection is replaced when a stream finds it broken. The old one stays open for the streams
that still use it, and is closed with the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvrelay.decode_worker.hand_over_stream import HandOverStream
from kvrelay.decode_worker.handshake import Handshake
from kvrelay.decode_worker.refused_peers import RefusedPeers
from kvrelay.kv_transfer.errors import TransferRefusedError
from kvrelay.net.channels import worker_channel
from kvrelay.net.tls import CurrentTls
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.worker_info import WorkerAddress


@dataclass(eq=False, slots=True)
class _Connection:
    """A channel to one prefill worker, or the handshake that will make it."""

    handshake: asyncio.Task[grpc.aio.Channel]
    num_streams: int = 0
    """The number of streams that use it."""

    async def close(self) -> None:
        """Wait for the handshake and close its channel, which ends every stream on it."""
        await asyncio.wait([self.handshake])
        if not self.handshake.cancelled() and self.handshake.exception() is None:
            await self.handshake.result().close()


class PrefillConnections:
    """All connections of a decode worker to prefill workers. Lives on the event loop.

    Args:
        handshake: is run on each new connection.
        on_probed: called with what each handshake has measured.
        credentials: for prefill workers; None: plain text.
    """

    def __init__(
        self,
        handshake: Handshake,
        on_probed: Callable[[PeerTransport], None],
        credentials: CurrentTls | None,
    ) -> None:
        self._handshake = handshake
        self._on_probed = on_probed
        self._credentials = credentials
        self._refused = RefusedPeers(self._measure_once, on_probed)
        self._current: dict[str, _Connection] = {}
        """The connection of each incarnation that a new stream would use."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def incarnations(self) -> set[str]:
        """The workers that are connected, or refused."""
        return self._current.keys() | self._refused.incarnations

    @asynccontextmanager
    async def channel_for(self, stream: HandOverStream) -> AsyncIterator[grpc.aio.Channel]:
        """Open a channel to the stream's peer, after a handshake if there is none yet.

        Once the stream has ended as `unreadable`, or because gRPC has lost the connection, later
        streams get a new connection.

        Raises:
            TransferRefusedError: the peer is refused.
            Exception: what `Handshake.run` raises.
        """
        self._refused.check(stream.peer.incarnation)
        connection = self._connection_to(stream.peer)
        connection.num_streams += 1
        try:
            yield await asyncio.shield(connection.handshake)
        except grpc.aio.AioRpcError as error:
            stream.unreadable |= error.code() is grpc.StatusCode.UNAVAILABLE
            raise
        finally:
            connection.num_streams -= 1
            if stream.unreadable:
                self._drop(stream.peer, connection)
            if not connection.num_streams and not self._is_current(stream.peer, connection):
                await connection.close()

    def connect_anew(self, peer: WorkerAddress) -> None:
        """Make a new connection at once, which streams that open from now on use.

        Does nothing if a handshake is in progress already.
        """
        current = self._current.get(peer.incarnation)
        if current is None or not current.handshake.done():
            return
        self._drop(peer, current)
        if not current.num_streams:
            closing = asyncio.create_task(current.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._connection_to(peer)

    async def forget(self, incarnation: str) -> None:
        """Close the connection to a worker that died; streams that wait for it stop waiting."""
        self._refused.forget(incarnation)
        connection = self._current.pop(incarnation, None)
        if connection is not None:
            connection.handshake.cancel()
            await connection.close()

    async def close(self) -> None:
        """Close every connection."""
        for incarnation in list(self._current):
            await self.forget(incarnation)
        await asyncio.gather(*self._closing)
        await self._refused.close()

    def _connection_to(self, peer: WorkerAddress) -> _Connection:
        connection = self._current.get(peer.incarnation)
        if connection is None:
            connection = _Connection(asyncio.create_task(self._connect(peer)))
            connection.handshake.add_done_callback(lambda _: self._drop_failed(peer, connection))
            self._current[peer.incarnation] = connection
        return connection

    async def _connect(self, peer: WorkerAddress) -> grpc.aio.Channel:
        channel = worker_channel(peer.address, self._credentials)
        try:
            found = await self._handshake.run(peer.incarnation, channel)
            if found.refusal:
                self._refused.refuse(peer, found.refusal)
            self._on_probed(found)
            if found.refusal:
                raise TransferRefusedError(found.refusal)
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _measure_once(self, peer: WorkerAddress) -> PeerTransport:
        async with worker_channel(peer.address, self._credentials) as channel:
            return await self._handshake.run(peer.incarnation, channel)

    def _drop_failed(self, peer: WorkerAddress, connection: _Connection) -> None:
        """Drop a connection whose handshake has failed, so that the next stream tries again."""
        handshake = connection.handshake
        if handshake.cancelled() or handshake.exception() is not None:
            self._drop(peer, connection)

    def _drop(self, peer: WorkerAddress, connection: _Connection) -> None:
        """Make sure that no new stream uses the connection."""
        if self._is_current(peer, connection):
            del self._current[peer.incarnation]

    def _is_current(self, peer: WorkerAddress, connection: _Connection) -> bool:
        return self._current.get(peer.incarnation) is connection
