"""A client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

import grpc

from kvrelay.client.access import open_aio_channel
from kvrelay.client.answer import Answer
from kvrelay.client.attempts import Attempts, without_completion
from kvrelay.client.cluster import Cluster
from kvrelay.client.errors import CallFailed
from kvrelay.client.requests import Prompt
from kvrelay.client.resumption import Resumption
from kvrelay.v1 import inference_pb2 as pb


class AsyncClient(Cluster):
    """Calls the routers of a cluster, on the event loop that it was made on.

    A context that closes it. Args and Raises: as of `Cluster`.
    """

    _open_channel = staticmethod(open_aio_channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def generate(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """The stream of a request: its deltas, then its completion, each `GenerateResponse` once.

        To leave it early, close it (`contextlib.aclosing`) or cancel the task that iterates.

        Args:
            prompt: text, token ids, or a whole request.
            timeout_seconds: for all of it; the cluster then ends it, too.
            fields: as of `make_request`.

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
        """As `generate`, but all at once. Raises `ClientError`, too."""
        answer = Answer()
        async for response in self.generate(prompt, timeout_seconds=timeout_seconds, **fields):
            answer.take(response)
        return answer

    async def call(self, method: str, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """One of the other calls of `InferenceService`, as ``call("Tokenize", TokenizeRequest())``.

        Raises:
            CallFailed: it cannot be had.
        """
        attempts = self._attempts(timeout_seconds)
        while True:
            server, wait = attempts.next()
            await asyncio.sleep(wait)
            try:
                return await self._call_once(server, method, request, attempts.seconds_left)
            except CallFailed as failure:
                attempts.failed(failure)

    async def abort(self, request_id: str, *, timeout_seconds: float | None = None) -> bool:
        """End a live request, whichever router has it; returns whether one had it.

        Raises:
            CallFailed: none had it of those that could be asked.
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
        call = getattr(self._stubs[server], method)
        try:
            return await call(request, timeout=timeout_seconds, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise CallFailed.of(server, error) from error

    async def _stream(
        self, request: pb.GenerateRequest, attempts: Attempts
    ) -> AsyncGenerator[pb.GenerateResponse]:
        resumption = Resumption()
        while True:
            server, wait = attempts.next()
            await asyncio.sleep(wait)
            resumption.begin()
            self._balancer.begin(server)
            call = self._stubs[server].Generate(
                request, timeout=attempts.seconds_left, metadata=self._access.metadata
            )
            try:
                async for response in call:
                    event = resumption.take(response)
                    attempts.heard(server, is_new=event is not None)
                    if event is not None:
                        yield event
                    if response.HasField("complete"):
                        return
                failure = without_completion(server)
            except grpc.RpcError as error:
                failure = CallFailed.of(server, error)
            finally:
                call.cancel()
                self._balancer.end(server)
            attempts.failed(failure)
