"""The routers' side of a worker: one stream each, in and out of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from kvrelay.engine.commands import Attach, Cancel, Detach, Inbox, Inspect
from kvrelay.engine.edge import check_incarnation, first_message
from kvrelay.engine.outputs import (
    End,
    EndReason,
    Output,
    RequestKey,
    RouterLink,
    StepOutputs,
)
from kvrelay.engine.wire import (
    SubmitRules,
    page_owners_to_wire,
    step_to_wire,
    submit_from_wire,
)
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `kvrelay.v1.WorkerService`.

    Args:
        incarnation: this worker's; a router that means another is refused.
        inbox: the engine's.
        rules: what submissions must keep to.
    """

    def __init__(self, incarnation: str, inbox: Inbox, rules: SubmitRules) -> None:
        self._incarnation = incarnation
        self._inbox = inbox
        self._rules = rules

    async def Attach(  # noqa: N802 (gRPC's name)
        self,
        requests: AsyncIterator[worker_pb2.AttachRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Serve one router until its stream ends; then its requests end too."""
        link = await self._greet(requests, context)
        self._inbox.post(Attach(link))
        reader = asyncio.create_task(self._read(requests, link))
        try:
            async for step in link:
                yield step_to_wire(step)
        finally:
            self._inbox.post(Detach(link))
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def GetPageOwners(  # noqa: N802 (gRPC's name)
        self, request: worker_pb2.GetPageOwnersRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetPageOwnersResponse:
        """Who has each page, as the engine's thread sees it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[worker_pb2.GetPageOwnersResponse] = loop.create_future()

        def tell(owners: worker_pb2.GetPageOwnersResponse) -> None:
            if not answer.cancelled():
                answer.set_result(owners)

        def look(ledger: Ledger) -> None:
            owners = page_owners_to_wire(ledger)
            loop.call_soon_threadsafe(tell, owners)

        self._inbox.post(Inspect(look))
        return await answer

    async def _greet(
        self,
        requests: AsyncIterator[worker_pb2.AttachRequest],
        context: grpc.aio.ServicerContext,
    ) -> RouterLink:
        first = await first_message(requests, context, "command", "hello")
        await check_incarnation(context, first.hello.incarnation, self._incarnation, self._inbox)
        return RouterLink(first.hello.router)

    async def _read(
        self, requests: AsyncIterator[worker_pb2.AttachRequest], link: RouterLink
    ) -> None:
        """Feed the engine's inbox; the stream's end, whatever its cause, closes the link."""
        try:
            async for message in requests:
                self._take(message, link)
        except grpc.RpcError as error:
            logger.info("router %s went away: %s", link.router, error)
        finally:
            link.close()

    def _take(self, message: worker_pb2.AttachRequest, link: RouterLink) -> None:
        match message.WhichOneof("command"):
            case "submit":
                self._submit(message.submit, link)
            case "cancel":
                cancel = message.cancel
                key = RequestKey(link.router, cancel.request_id, cancel.attempt)
                self._inbox.post(Cancel(key))
            case other:
                logger.warning("router %s sent an unknown command: %s", link.router, other)

    def _submit(self, message: worker_pb2.SubmitRequest, link: RouterLink) -> None:
        try:
            self._inbox.post(submit_from_wire(message, link, self._rules))
        except ValueError as error:
            key = RequestKey(link.router, message.request_id, message.attempt, message.first_choice)
            end = End(EndReason.FAILED, error=str(error))
            link.deliver(StepOutputs((Output(key, 0, end=end),)))
