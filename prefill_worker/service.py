"""The decode workers' side of a prefill worker: one stream for each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from kvrelay.engine.commands import Inbox
from kvrelay.engine.edge import check_incarnation, first_message
from kvrelay.engine.outputs import RequestKey
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import PageSum, Place
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Ask,
    Beat,
    Done,
    Ended,
    EndReason,
    FromDecode,
    FromPrefill,
    Grant,
    Released,
    Said,
)
from kvrelay.kv_transfer.spans import PoolLayout
from kvrelay.prefill_worker.request import (
    HandOverStream,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc

logger = logging.getLogger(__name__)

_END_REASONS = {
    EndReason.FINISHED: hand_over_pb2.HandOverEnded.REASON_FINISHED,
    EndReason.ABORTED: hand_over_pb2.HandOverEnded.REASON_ABORTED,
    EndReason.FAILED: hand_over_pb2.HandOverEnded.REASON_FAILED,
}


class HandOverService(hand_over_pb2_grpc.HandOverServiceServicer):
    """Serves `kvrelay.v1.HandOverService`.

    Args:
        agent: whose pool the decode workers read.
        inbox: the engine's.
    """

    def __init__(self, agent: TransferAgent, inbox: Inbox) -> None:
        self._agent = agent
        self._inbox = inbox

    async def DescribeAgent(  # noqa: N802 (gRPC's name)
        self,
        request: hand_over_pb2.DescribeAgentRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[hand_over_pb2.DescribeAgentResponse]:
        """Tell a puller how to read this worker's pool; it probes the transport, then it leaves."""
        await check_incarnation(context, request.incarnation, self._agent.incarnation, self._inbox)
        peer = self._agent.describe()
        described = hand_over_pb2.DescribeAgentResponse(
            incarnation=peer.incarnation,
            agent_metadata=peer.metadata,
            agent_metadata_sha256=peer.metadata_sha256,
            device_id=peer.layouts[0].device_id,
            memory_type=peer.layouts[0].memory_type,
            pools=map(_pool_to_wire, peer.layouts),
            scratch=_pool_to_wire(peer.scratch),
        )
        self._agent.serve(+1)
        try:
            yield described
            await asyncio.Event().wait()
        finally:
            self._agent.serve(-1)

    async def HandOver(  # noqa: N802 (gRPC's name)
        self,
        requests: AsyncIterator[hand_over_pb2.HandOverRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[hand_over_pb2.HandOverResponse]:
        """Carry one request's hand-over; the stream's end is the lease's end."""
        stream = await self._open(requests, context)
        self._inbox.post(StreamOpened(stream))
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            async for message in stream:
                yield _to_wire(message)
        finally:
            self._inbox.post(StreamClosed(stream))
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _open(
        self,
        requests: AsyncIterator[hand_over_pb2.HandOverRequest],
        context: grpc.aio.ServicerContext,
    ) -> HandOverStream:
        first = await first_message(requests, context, "message", "open")
        opened = first.open
        meant, actual = opened.prefill_incarnation, self._agent.incarnation
        await check_incarnation(context, meant, actual, self._inbox)
        key = RequestKey(opened.router, opened.request_id, opened.attempt)
        return HandOverStream(key, opened.decode_incarnation)

    async def _read(
        self, requests: AsyncIterator[hand_over_pb2.HandOverRequest], stream: HandOverStream
    ) -> None:
        try:
            async for message in requests:
                self._inbox.post(StreamMessage(stream, _from_wire(message)))
        except (grpc.RpcError, ValueError) as error:
            logger.info("hand-over of %s broke: %s", stream.key, error)
        finally:
            stream.close()


def _pool_to_wire(pool: PoolLayout) -> hand_over_pb2.PoolDescription:
    geometry = pool.geometry
    return hand_over_pb2.PoolDescription(
        address=pool.address,
        pages=pool.total_pages,
        geometry=hand_over_pb2.PoolGeometry(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=str(geometry.dtype).removeprefix("torch."),
            page_size=geometry.page_size,
            order=geometry.order.value,
            latent=geometry.latent,
            window=geometry.window,
            draft=geometry.draft,
        ),
    )


def _from_wire(message: hand_over_pb2.HandOverRequest) -> Said[FromDecode]:
    return Said(message.number, _message_from_wire(message))


def _message_from_wire(message: hand_over_pb2.HandOverRequest) -> FromDecode:
    match message.WhichOneof("message"):
        case "grant":
            return Grant()
        case "done":
            return Done(tuple(map(_sum_from_wire, message.done.sums)))
        case "beat":
            return Beat()
        case other:
            raise ValueError(f"unknown hand-over message: {other}")


def _sum_from_wire(page: hand_over_pb2.PageSum) -> PageSum:
    return PageSum(Place(page.pool, page.page), page.value)


def _to_wire(said: Said[FromPrefill]) -> hand_over_pb2.HandOverResponse:
    wire = hand_over_pb2.HandOverResponse(number=said.number)
    match said.message:
        case Ask():
            wire.ask.SetInParent()
        case Announce() as message:
            wire.announce.CopyFrom(_announce_to_wire(message))
        case Released(valid, mismatches):
            wire.released.valid, wire.released.mismatches = valid, mismatches
            wire.released.SetInParent()
        case Ended(reason, detail):
            wire.ended.reason, wire.ended.detail = _END_REASONS[reason], detail
        case Beat():
            wire.beat.SetInParent()
    return wire


def _announce_to_wire(message: Announce) -> hand_over_pb2.HandOverAnnounce:
    announce = hand_over_pb2.HandOverAnnounce(
        runs=[
            hand_over_pb2.PageRun(first_page=run.first_page, page_ids=run.page_ids)
            for run in message.runs
        ]
    )
    for token in message.first_tokens:
        announce.first_tokens.add(token_id=token.token_id, finished=token.finished)
    return announce
