"""A client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Self

import grpc

from kvrelay.client.access import open_aio_channel
from kvrelay.client.answer import Answer
from kvrelay.client.attempts import Attempts, cancelled, without_completion
from kvrelay.client.errors import CallFailed
from kvrelay.client.known_routers import KnownRouters
from kvrelay.client.requests import Prompt
from kvrelay.client.resumption import Resumption
from kvrelay.v1 import inference_pb2 as pb


class AsyncClient(KnownRouters):
    """A client of a cluster's routers, bound to the event loop that it was made on.

    As a context manager it closes itself. Args and Raises: see `KnownRouters`.
    """

    _open_channel = staticmethod(open_aio_channel)

    @cached_property
    def _closed(self) -> asyncio.Event:
        """The event that wakes the tasks that wait for a retry."""
        return asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls; they raise `CallFailed`, and so do later ones."""
        self._balancer.is_closed = True
        self._closed.set()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def generate(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream a request's deltas, then its completion, each `GenerateResponse` once.

        To leave it early, close it (`contextlib.aclosing`) or cancel the task that iterates.

        Args:
            prompt: text, token ids, or a whole request.
            timeout_seconds: for the whole request; the cluster ends it then, too.
            fields: see `make_request`.

        Raises:
            ValueError: there is no such field. The stream raises `CallFailed` or `Diverged`.
        """
        return self._stream(self._request(prompt, fields), self._attempts(timeout_seconds))

    async def answer(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **fields: Any,
    ) -> Answer:
        """Return the whole answer at once; the rest is as for `generate`.

        Raises `ClientError`, too.
        """
        answer = Answer()
        async for response in self.generate(prompt, timeout_seconds=timeout_seconds, **fields):
            answer.take(response)
        return answer

    async def call(self, method: str, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """Make any other call of `InferenceService`, as ``call("Tokenize", TokenizeRequest())``.

        Raises:
            CallFailed: no router answered in time, or one refused.
        """
        attempts = self._attempts(timeout_seconds)
        while True:
            server, wait = attempts.next()
            await self._sleep(server, wait)
            try:
                return await self._call_once(server, method, request, attempts.seconds_left)
            except CallFailed as failure:
                attempts.failed(failure)

    async def abort(self, request_id: str, *, timeout_seconds: float | None = None) -> bool:
        """End a live request, whichever router has it; return whether one had it.

        Raises:
            CallFailed: a router could not be asked, and none of the others had the request.
        """
        message, failure = pb.AbortRequest(request_id=request_id), None
        for server in self._servers:
            try:
                if (await self._call_once(server, "Abort", message, timeout_seconds)).aborted:
                    return True
            except CallFailed as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    async def _call_once(
        self, server: str, method: str, request: Any, timeout_seconds: float | None
    ) -> Any:
        with self._failing(server):
            call = getattr(self._stubs[server], method)
            answer = await call(request, timeout=timeout_seconds, metadata=self._access.metadata)
        self._balancer.answered(server)
        return answer

    async def _stream(
        self, request: pb.GenerateRequest, attempts: Attempts
    ) -> AsyncGenerator[pb.GenerateResponse]:
        resumption = Resumption()
        while True:
            server, wait = attempts.next()
            await self._sleep(server, wait)
            resumption.begin()
            try:
                with self._calling(server, request, attempts.seconds_left) as call:
                    async for response in call:
                        event = resumption.take(response)
                        attempts.heard(server, is_new=event is not None)
                        if event is not None:
                            yield event
                        if response.HasField("complete"):
                            return
                failure = without_completion(server)
            except CallFailed as error:
                failure = error
            attempts.failed(failure)

    @contextmanager
    def _calling(
        self, server: str, request: pb.GenerateRequest, timeout_seconds: float | None
    ) -> Iterator[Any]:
        self._balancer.begin(server)
        call = None
        try:
            with self._failing(server):
                call = self._stubs[server].Generate(
                    request, timeout=timeout_seconds, metadata=self._access.metadata
                )
                yield call
        finally:
            if call is not None:
                call.cancel()
            self._balancer.end(server)

    @contextmanager
    def _failing(self, server: str) -> Iterator[None]:
        """Raise `CallFailed` for what gRPC raises, and if the client is closed or gets closed."""
        if self._balancer.is_closed:
            raise cancelled(server)
        try:
            yield
        except grpc.RpcError as error:
            raise CallFailed.of(server, error) from error
        except asyncio.CancelledError as error:  # of the call by its channel, or of this task
            task = asyncio.current_task()
            if not self._closed.is_set() or (task is not None and task.cancelling()):
                raise
            raise cancelled(server) from error

    async def _sleep(self, server: str, seconds: float) -> None:
        """Wait for a retry; raises `CallFailed` as soon as the client is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        if self._balancer.is_closed:
            raise cancelled(server)
