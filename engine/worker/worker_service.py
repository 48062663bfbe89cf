"""The routers' side of a worker: one stream for each router, in and out of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc

from kvrelay.engine.scheduler.attempt_trace import begin_trace
from kvrelay.engine.scheduler.commands import (
    Attach,
    Command,
    Detach,
    FindHistory,
    FromRouter,
    Inspect,
    Mailbox,
)
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.worker.black_box import posthumous_ends
from kvrelay.engine.worker.held_submits import HeldSubmits, Prepare
from kvrelay.engine.worker.load_reports import PacedLink
from kvrelay.engine.worker.service_checks import check_incarnation, check_version, first_message
from kvrelay.engine.worker.submit_rules import SubmitRules, submit_command
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.observe.spans import SpanSink
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.messages import ATTACH_REQUEST, ENGINE_OUTPUTS, PAGE_OWNERS
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput
from kvrelay.wire.page_owners import OwnedPages, PageOwners, PoolOwners
from kvrelay.wire.submit import (
    AttachHello,
    CancelRequest,
    ForgetSessionRequest,
    RequestKey,
    SubmitRequest,
    TellPrefixesRequest,
    WatchRequests,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The service `kvrelay.v1.WorkerService`.

    Args:
        incarnation: this worker's; a router that means another is refused.
        inbox: the engine's.
        rules: the rules for submissions.
        killed: the requests of the forward that killed the previous process, if one did.
        prepare: begins to compile a grammar; the request waits for it.
        spans: takes the spans of traced requests; None: no request is traced here.
    """

    def __init__(
        self,
        incarnation: str,
        inbox: Mailbox[Command],
        rules: SubmitRules,
        killed: Sequence[RequestKey] = (),
        prepare: Prepare = lambda _: None,
        spans: SpanSink | None = None,
    ) -> None:
        self._spans = spans
        self._submits = HeldSubmits(inbox, prepare)
        self._killed = posthumous_ends(killed)
        self._incarnation = incarnation
        self._inbox = inbox
        self._rules = rules
        self._links: set[RouterLink] = set()

    def retract_held(self) -> None:
        """Make routers submit requests that wait for a grammar to other workers."""
        self._submits.retract_all()

    def close(self) -> None:
        """End the routers' streams after what is already in them."""
        for link in self._links:
            link.close()

    async def Attach(  # noqa: N802 (gRPC's name)
        self,
        requests: AsyncIterator[worker_pb2.AttachRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Serve one router until its stream ends; then its requests end too."""
        link = await self._greet(requests, context)
        killed = tuple(one for one in self._killed if one.key.router == link.router)
        self._inbox.post(Attach(link))
        self._links.add(link)
        reader = asyncio.create_task(self._read(requests, link))
        try:
            async for step in link:
                # With the first load: before the router submits anything to this process.
                first = replace(step, outputs=step.outputs + killed) if killed else step
                killed = ()
                yield ENGINE_OUTPUTS.to_message(first.packed())
        finally:
            self._links.discard(link)
            self._submits.forget(link)
            self._inbox.post(Detach(link))
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def GetPageOwners(  # noqa: N802 (gRPC's name)
        self, request: worker_pb2.GetPageOwnersRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetPageOwnersResponse:
        """Return the owner of each page, as the engine thread sees it between two passes."""
        told, tell = _told_by_thread(PageOwners)
        self._inbox.post(Inspect(lambda kv_cache: tell(page_owners(kv_cache))))
        return PAGE_OWNERS.to_message(await told)

    async def FindHistory(  # noqa: N802 (gRPC's name)
        self, request: worker_pb2.FindHistoryRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.FindHistoryResponse:
        """Return the history of a session that another router had, if it is here."""
        told, tell = _told_by_thread(array)
        self._inbox.post(
            FindHistory(
                request.owner,
                request.digest,
                lambda history: tell(history or array("I")),
                lambda: not told.cancelled(),
            )
        )
        return worker_pb2.FindHistoryResponse(token_ids=await told)

    async def _greet(
        self,
        requests: AsyncIterator[worker_pb2.AttachRequest],
        context: grpc.aio.ServicerContext,
    ) -> PacedLink:
        first = await first_message(requests, context, "command", "hello")
        await check_incarnation(context, first.hello.incarnation, self._incarnation, self._inbox)
        await check_version(context, first.hello.router, first.hello.version)
        return PacedLink(first.hello.router)

    async def _read(
        self, requests: AsyncIterator[worker_pb2.AttachRequest], link: RouterLink
    ) -> None:
        """Feed the engine's inbox; the stream's end, whatever its cause, closes the link."""
        try:
            async for message in requests:
                self.take(message, link)
        except grpc.RpcError as error:
            logger.info("router %s went away: %s", link.router, error)
        finally:
            link.close()

    def take(self, message: worker_pb2.AttachRequest, link: RouterLink) -> None:
        """Post a router's command, or refuse a submission that breaks a rule."""
        try:
            command = ATTACH_REQUEST.from_message(message).command
            match command:
                case SubmitRequest():
                    trace = begin_trace(
                        self._spans, command.traceparent, self._rules.role, command.key
                    )
                    self._submits.submit(submit_command(command, link, self._rules, trace))
                case CancelRequest():
                    self._submits.cancel(CancelRequest(command.key._replace(router=link.router)))
                case TellPrefixesRequest() | ForgetSessionRequest() | WatchRequests():
                    self._inbox.post(FromRouter(link, command))
                case AttachHello():
                    logger.warning("router %s sent a second hello", link.router)
        except ValueError as error:
            if message.HasField("submit"):
                _refuse(message.submit, link, str(error))
            else:
                logger.warning("router %s: %s", link.router, error)


def _told_by_thread(_kind: type[T]) -> tuple[asyncio.Future[T], Callable[[T], object]]:
    """Make a future, and a function by which another thread sets it; late values are dropped."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[T] = loop.create_future()

    def take(value: T) -> None:
        if not told.cancelled():
            told.set_result(value)

    def tell(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(take, value)

    return told, tell


def _refuse(submit: worker_pb2.SubmitRequest, link: RouterLink, error: str) -> None:
    """Tell the router that the attempt has failed, by a choice that it asked for."""
    key = RequestKey(link.router, submit.request_id, submit.attempt, submit.first_choice)
    end = RequestEnd(EndReason.FAILED, error=error)
    link.deliver(EngineOutputs((RequestOutput(key, 0, end=end),)))


def page_owners(kv_cache: KVCacheManager) -> PageOwners:
    """List every page of every pool, in runs of one owner."""
    return PageOwners(
        tuple(
            PoolOwners(shape.name, tuple(_owned_pages(kv_cache, pool)))
            for pool, shape in enumerate(kv_cache.shape.pools)
        )
    )


def _owned_pages(kv_cache: KVCacheManager, pool: int) -> list[OwnedPages]:
    return [
        OwnedPages(run.first_page, run.num_pages, run.owner.name.lower(), run.holder)
        for run in kv_cache.audit.owner_runs(pool)
    ]
