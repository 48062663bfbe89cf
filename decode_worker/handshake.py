"""The handshake with a prefill worker: learn how its pools are read, and measure how fast."""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import PeerRefusedError, TransferError
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.v1 import hand_over_pb2, hand_over_pb2_grpc
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.messages import AGENT

ANSWER_TIMEOUT_S = 10.0
"""The longest wait for a prefill worker's description of itself. It holds no memory for this."""
DEATH_NOTICE_S = 0.5
"""The time in which gRPC notices a death that NIXL has noticed, which tells dead from slow."""


class Handshake:
    """The handshake that makes a prefill worker's pools readable and measures its transport.

    Args:
        agent: is given each peer's description.
        prober: measures.
    """

    def __init__(self, agent: TransferAgent, prober: TransportProber) -> None:
        self._agent = agent
        self._prober = prober

    async def run(self, incarnation: str, channel: grpc.aio.Channel) -> PeerTransport:
        """Shake hands with the prefill worker behind `channel`.

        Returns:
            The measurement. It is a refusal if the worker's model or pages do not fit this one's.
            It also is if the worker is read too slowly or not at all.

        Raises:
            TransferError: its answer makes no sense.
            grpc.RpcError: it cannot be reached, or dies meanwhile.
            TimeoutError: it does not answer within `ANSWER_TIMEOUT_S`.
        """
        stub = hand_over_pb2_grpc.HandOverServiceStub(channel)
        call = stub.DescribeAgent(hand_over_pb2.DescribeAgentRequest(incarnation=incarnation))
        try:
            host_pages = await self._add_peer(incarnation, call)
            return await self._measure(incarnation, host_pages, call)
        except PeerRefusedError as error:
            return PeerTransport(incarnation, refusal=str(error))
        finally:
            call.cancel()

    async def _add_peer(self, incarnation: str, call: grpc.aio.UnaryStreamCall) -> int:
        """Give the agent the worker's description. Returns the pages of its host tier, or 0."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await call.read()
        if answer is grpc.aio.EOF:
            raise TransferError(f"{incarnation} has not described its pools")
        description = AGENT.from_message(answer)
        self._agent.meet(incarnation, description)
        return description.host_pools[0].pages if description.host_pools else 0

    async def _measure(
        self, incarnation: str, host_pages: int, call: grpc.aio.UnaryStreamCall
    ) -> PeerTransport:
        """Measure while the call lives; it ends early only with the peer or its connection."""
        measuring = asyncio.create_task(self._prober.measure(incarnation, host_pages))
        call_ended = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({measuring, call_ended}, return_when=asyncio.FIRST_COMPLETED)
            if measuring.done() and measuring.result().refusal:
                await asyncio.wait({call_ended}, timeout=DEATH_NOTICE_S)
            if call_ended.done():
                call_ended.result()
                raise TransferError(f"{incarnation} ended the handshake before it was measured")
            return await measuring
        finally:
            for task in (measuring, call_ended):
                task.cancel()
            await asyncio.gather(measuring, call_ended, return_exceptions=True)
