"""The decode workers' side of a prefill worker: one stream for each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from kvrelay.engine.scheduler.commands import Mailbox, Misdirected
from kvrelay.engine.worker.service_checks import check_incarnation, first_message
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.prefill_worker.request import (
    HandOverStream,
    StreamClosed,
    StreamEvent,
    StreamMessage,
    StreamOpened,
)
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc
from kvrelay.wire.messages import AGENT, FROM_DECODE, FROM_PREFILL, HAND_OVER_OPEN

logger = logging.getLogger(__name__)


class HandOverService(hand_over_pb2_grpc.HandOverServiceServicer):
    """The service `kvrelay.v1.HandOverService`.

    Args:
        agent: the agent of the pools that decode workers read.
        inbox: the engine's.
    """

    def __init__(self, agent: TransferAgent, inbox: Mailbox[StreamEvent | Misdirected]) -> None:
        self._agent = agent
        self._inbox = inbox

    async def DescribeAgent(  # noqa: N802 (gRPC's name)
        self,
        request: hand_over_pb2.DescribeAgentRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[hand_over_pb2.DescribeAgentResponse]:
        """Tell a puller how to read this worker's pool; the call lasts while it is probed."""
        await check_incarnation(context, request.incarnation, self._agent.incarnation, self._inbox)
        self._agent.begin_serving()
        try:
            yield AGENT.to_message(self._agent.describe().plain())
            await asyncio.Event().wait()
        finally:
            self._agent.end_serving()

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
                yield FROM_PREFILL.to_message(message)
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
        opened = HAND_OVER_OPEN.from_message(first.open)
        meant, actual = opened.prefill_incarnation, self._agent.incarnation
        await check_incarnation(context, meant, actual, self._inbox)
        return HandOverStream(opened.key, opened.decode_incarnation)

    async def _read(
        self, requests: AsyncIterator[hand_over_pb2.HandOverRequest], stream: HandOverStream
    ) -> None:
        try:
            async for message in requests:
                self._inbox.post(StreamMessage(stream, FROM_DECODE.from_message(message)))
        except (grpc.RpcError, ValueError) as error:
            fields = stream.key.fields
            logger.info("hand-over of %s broke: %s", stream.key, error, extra=fields)
        finally:
            stream.close()
