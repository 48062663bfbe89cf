"""A client for threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

import grpc

from kvrelay.client.access import open_channel
from kvrelay.client.answer import Answer
from kvrelay.client.attempts import Attempts, cancelled, without_completion
from kvrelay.client.errors import CallFailed
from kvrelay.client.known_routers import KnownRouters
from kvrelay.client.requests import Prompt
from kvrelay.client.resumption import Resumption
from kvrelay.v1 import inference_pb2 as pb

_LOOK_SECONDS: Final = 0.1
"""Seconds between two looks whether the call is over, during the wait for a retry."""


class Client(KnownRouters):
    """A client of a cluster's routers, for any number of threads.

    As a context manager it closes itself. Args and Raises: see `KnownRouters`.
    """

    _open_channel = staticmethod(open_channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls; they raise `CallFailed`, and so do later ones."""
        self._balancer.is_closed = True
        for channel in self._channels.values():
            channel.close()

    def generate(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **fields: Any,
    ) -> Stream:
        """Start a request; return the stream of its deltas and its completion.

        Args:
            prompt: text, token ids, or a whole request.
            timeout_seconds: for the whole request; the cluster ends it then, too.
            fields: see `make_request`.

        Raises:
            ValueError: there is no such field. Failures of the call are raised by the stream.
        """
        return Stream(self, self._request(prompt, fields), self._attempts(timeout_seconds))

    def answer(
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
        for response in self.generate(prompt, timeout_seconds=timeout_seconds, **fields):
            answer.take(response)
        return answer

    def call(self, method: str, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """Make any other call of `InferenceService`, as ``call("Tokenize", TokenizeRequest())``.

        Raises:
            CallFailed: no router answered in time, or one refused.
        """
        attempts = self._attempts(timeout_seconds)
        while True:
            server, wait = attempts.next()
            _sleep(server, wait, lambda: self._balancer.is_closed)
            try:
                return self._call_once(server, method, request, attempts.seconds_left)
            except CallFailed as failure:
                attempts.failed(failure)

    def abort(self, request_id: str, *, timeout_seconds: float | None = None) -> bool:
        """End a live request, whichever router has it; return whether one had it.

        Raises:
            CallFailed: a router could not be asked, and none of the others had the request.
        """
        message, failure = pb.AbortRequest(request_id=request_id), None
        for server in self._servers:
            try:
                if self._call_once(server, "Abort", message, timeout_seconds).aborted:
                    return True
            except CallFailed as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    def _call_once(
        self, server: str, method: str, request: Any, timeout_seconds: float | None
    ) -> Any:
        try:
            answer = self._begin(server, method, request, timeout_seconds)
        except grpc.RpcError as error:
            raise CallFailed.of(server, error) from error
        self._balancer.answered(server)
        return answer

    def _begin(self, server: str, method: str, request: Any, timeout_seconds: float | None) -> Any:
        """Call a router; raises `CallFailed` if the client is closed, else what gRPC raises."""
        call = getattr(self._stubs[server], method)
        try:
            return call(request, timeout=timeout_seconds, metadata=self._access.metadata)
        except ValueError as error:  # the channel's, if it is closed
            if self._balancer.is_closed:
                raise cancelled(server) from error
            raise


class Stream:
    """The events of a request, each `GenerateResponse` once; an iterator, for one thread.

    If the call breaks, the stream goes on with a new call, on another router if there is one.
    Iterating raises `CallFailed` or `Diverged`.
    """

    def __init__(self, client: Client, request: pb.GenerateRequest, attempts: Attempts) -> None:
        self.request_id = request.request_id
        """The request's id; empty if the router is to draw one."""
        self._client = client
        self._request = request
        self._attempts = attempts
        self._call: Any = None
        self._is_cancelled = False
        self._events = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.GenerateResponse:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the request; its iterator raises `CallFailed`.

        Callable from any thread or signal handler.
        """
        self._is_cancelled = True
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """End the request if it is not over. Only the thread that iterates may call it."""
        self._events.close()

    def _run(self) -> Generator[pb.GenerateResponse]:
        resumption = Resumption()
        while True:
            server, wait = self._attempts.next()
            _sleep(server, wait, self._is_over)
            resumption.begin()
            try:
                with self._calling(server) as call:
                    for response in call:
                        event = resumption.take(response)
                        self._attempts.heard(server, is_new=event is not None)
                        if event is not None:
                            yield event
                        if response.HasField("complete"):
                            return
                failure = without_completion(server)
            except grpc.RpcError as error:
                failure = CallFailed.of(server, error)
            if self._is_cancelled:
                raise cancelled(server)
            self._attempts.failed(failure)

    @contextmanager
    def _calling(self, server: str) -> Iterator[Any]:
        client = self._client
        client._balancer.begin(server)
        try:
            self._call = client._begin(
                server, "Generate", self._request, self._attempts.seconds_left
            )
            if self._is_cancelled:
                self._call.cancel()
            yield self._call
        finally:
            if self._call is not None:
                self._call.cancel()
            self._call = None
            client._balancer.end(server)

    def _is_over(self) -> bool:
        return self._is_cancelled or self._client._balancer.is_closed


def _sleep(server: str, seconds: float, is_over: Callable[[], bool]) -> None:
    """Wait for a retry; no lock is held, so that a signal handler may end the call meanwhile.

    Raises:
        CallFailed: the call is over.
    """
    end = time.monotonic() + seconds
    while not is_over() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_SECONDS))
    if is_over():
        raise cancelled(server)
