"""The workers that a controller in another process lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.v1 import controller_pb2, controller_pb2_grpc
from kvrelay.wire.messages import WORKER_LIST
from kvrelay.wire.worker_info import WorkerInfo

_log = logging.getLogger(__name__)
_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 5.0
_HOPELESS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Answers that another try does not change; the last is that of a listener for clients."""


class RemoteDiscovery:
    """Follows a controller's list, and keeps the last one while the controller is away.

    Args:
        find: says the controller's address, which may be another one after its restart. Raises
            OSError if nobody knows it now.
        open_channel: makes a channel to an address.
        metadata: is sent with the call.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[str]],
        open_channel: Callable[[str], grpc.aio.Channel],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._find = find
        self._address = ""
        """As found last."""
        self._open_channel = open_channel
        self._metadata = tuple(metadata)
        self.metrics_address = ""
        """``host:port`` of this router's metrics; empty: nobody is told."""
        self._list = StaticDiscovery()
        self._known: asyncio.Future[None] | None = None

    def endpoints(self) -> Sequence[WorkerInfo]:
        """The workers that were live when the controller was heard last."""
        return self._list.endpoints()

    def awaited(self) -> Sequence[WorkerInfo]:
        """The workers that were lost then and will have successors."""
        return self._list.awaited()

    async def changed(self) -> None:
        """Returns after the next change; registers before it first suspends."""
        await self._list.changed()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follows the list while the context lasts; enters it once there is one.

        A controller that cannot be reached is waited for. Raises StartError if it refuses this
        router.
        """
        self._known = asyncio.get_running_loop().create_future()
        following = asyncio.create_task(self._follow(self._known))
        try:
            await self._known
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, known: asyncio.Future[None]) -> None:
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                async for said in self._lists():
                    delay = _FIRST_RETRY_SECONDS
                    listed = WORKER_LIST.from_message(said)
                    self._list.replace(listed.endpoints, listed.awaited)
                    if not known.done():
                        known.set_result(None)
                why = "it has ended the stream"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() in _HOPELESS and not known.done():
                    known.set_exception(StartError(f"--controller: {self._address}: {why}"))
                    return
            except OSError as error:
                why = str(error)
            except ValueError as error:  # another version's message
                why = str(error)
            _log.warning("the controller %s cannot be heard: %s", self._address, why)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    async def _lists(self) -> AsyncIterator[controller_pb2.WatchWorkersResponse]:
        self._address = await self._find()
        async with self._open_channel(self._address) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            request = controller_pb2.WatchWorkersRequest(metrics_address=self.metrics_address)
            call = stub.WatchWorkers(request, metadata=self._metadata)
            async for said in call:
                yield said
