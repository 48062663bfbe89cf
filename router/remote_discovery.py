"""The list of workers from a controller in another process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.v1 import controller_pb2, controller_pb2_grpc
from kvrelay.wire.messages import WORKER_LIST

_log = logging.getLogger(__name__)
_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 5.0
_HOPELESS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes that a retry does not change; the last one is a client listener's."""


class RemoteDiscovery(StaticDiscovery):
    """The controller's list of workers; the last one is kept while the controller is away.

    Args:
        find: returns the controller's address, which may change with its restart. Raises OSError if
            it is not known now.
        open_channel: makes a channel to an address.
        metadata: sent with the call.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[str]],
        open_channel: Callable[[str], grpc.aio.Channel],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__()
        self._find = find
        self._address = ""
        """The address that was found last."""
        self._open_channel = open_channel
        self._metadata = tuple(metadata)
        self.metrics_address = ""
        """The address of this router's metrics, ``host:port``; empty: not told."""
        self._shifted_to = ""
        self._asking_anew = asyncio.Event()
        self.silent_since: float | None = time.monotonic()
        """When the controller was last heard, by the monotonic clock; None: it is heard now."""
        self._known: asyncio.Future[None] | None = None

    def say(self, *, metrics_address: str, shifted_to: str) -> None:
        """Tell the controller this router's metrics address, and the successor that it follows."""
        if (metrics_address, shifted_to) != (self.metrics_address, self._shifted_to):
            self.metrics_address, self._shifted_to = metrics_address, shifted_to
            self._asking_anew.set()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the list while the context lasts; the context begins once there is one.

        It waits for a controller that cannot be reached. Raises StartError if the controller
        refuses this router.
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
                    delay, self.silent_since = _FIRST_RETRY_SECONDS, None
                    listed = WORKER_LIST.from_message(said)
                    self.replace(listed.endpoints, listed.awaited)
                    if listed.successor != self.successor():
                        self.shift_to(listed.successor)
                    if not known.done():
                        known.set_result(None)
                if self._asking_anew.is_set():
                    continue
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
            if self.silent_since is None:
                self.silent_since = time.monotonic()
                self.shift_to(self.successor())  # wakes the waiters for a change
            _log.warning("the controller %s cannot be heard: %s", self._address, why)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    async def _lists(self) -> AsyncIterator[controller_pb2.WatchWorkersResponse]:
        self._address = await self._find()
        async with self._open_channel(self._address) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            self._asking_anew.clear()
            request = controller_pb2.WatchWorkersRequest(
                metrics_address=self.metrics_address, shifted_to=self._shifted_to
            )
            call = stub.WatchWorkers(request, metadata=self._metadata)
            while (said := await self._next(call)) is not None:
                yield said

    async def _next(self, call: Any) -> controller_pb2.WatchWorkersResponse | None:
        """Read the controller's next list; None: its stream ended, or there is news to tell it."""
        reading = asyncio.ensure_future(call.read())
        asking = asyncio.create_task(self._asking_anew.wait())
        try:
            await asyncio.wait({reading, asking}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() or (said := reading.result()) is grpc.aio.EOF:
                return None
            return said  # type: ignore[no-any-return]
        finally:
            asking.cancel()
            reading.cancel()
