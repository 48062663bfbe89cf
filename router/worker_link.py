"""The router's stream to one incarnation of a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvrelay.net.ends import worker_channel
from kvrelay.router import wire
from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.router.generation import Submission
from kvrelay.router.load import WorkerLoad
from kvrelay.router.placement import Candidate
from kvrelay.router.worker_output import WorkerOutput
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 5.0


class Listener(Protocol):
    """Hears what becomes of one attempt at a request on one worker."""

    def on_output(self, role: WorkerRole, output: WorkerOutput) -> None:
        """The worker of this role produced something."""
        ...

    def on_lost(self, endpoint: WorkerEndpoint, detail: str) -> None:
        """The worker is lost and has released the attempt, or died with it."""
        ...


@dataclass(slots=True)
class _Submitted:
    """An attempt that the worker has not ended, and that nobody has cancelled."""

    listener: Listener
    input_tokens: int
    open_choices: set[int]
    """Those of its choices that the worker has not ended."""
    started: bool = False
    """Some output came: its input is no longer backlog."""


class WorkerLink:
    """Keeps the Attach stream of one worker incarnation and what runs through it.

    The stream is the lease on whatever was submitted: when it breaks, the
    worker releases it all, and every listener hears `on_lost`. A link is ready
    from the first message of a stream, which brings the worker's load, to the
    stream's end. Idle, it waits on that stream alone.

    Args:
        endpoint: the incarnation meant; another one at its address refuses.
        router_id: names this router to the worker.
        credentials: for the worker; None: plain text.
        max_message_bytes: of one message, each way.
        on_change: called when `ready`, `draining` or the load's peers have changed.
        on_stale: called for each output with tokens of no attempt known here.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        *,
        router_id: str,
        credentials: grpc.ChannelCredentials | None,
        max_message_bytes: int,
        on_change: Callable[[], None],
        on_stale: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.ready = False
        self.met = False
        """It has been ready, be it for a moment."""
        self.load = WorkerLoad()
        self._drains = False
        self._router_id = router_id
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._on_change = on_change
        self._on_stale = on_stale
        self._submitted: dict[tuple[str, int], _Submitted] = {}
        self._commands: asyncio.Queue[worker_pb2.AttachRequest | None] = asyncio.Queue()
        # Sent since the last load came: whether that load knew of them is open.
        self._tokens_since_load = 0

    @property
    def draining(self) -> bool:
        """It, or whoever lists it, has said that it takes no more requests: that is for good."""
        return self._drains or self.endpoint.draining

    def submit(
        self,
        submission: Submission,
        listener: Listener,
        prefill: WorkerEndpoint | None = None,
    ) -> None:
        """Sends an attempt to the worker, which must be ready. Does not block."""
        assert self.ready, f"{self.endpoint.worker} is not ready"
        key = (submission.request_id, submission.attempt)
        input_tokens = len(submission.input_ids)
        self._submitted[key] = _Submitted(listener, input_tokens, set(submission.choices))
        self._tokens_since_load += input_tokens
        self._commands.put_nowait(wire.submit_command(submission, prefill))

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tells the worker to give the attempt up; nothing if it has ended there.

        Its listener hears no more of it.
        """
        if self._submitted.pop((request_id, attempt), None) is not None:
            self._commands.put_nowait(wire.cancel_command(request_id, attempt))

    def give_up(self, request_id: str, attempt: int) -> None:
        """As `cancel`, but its listener still hears how the attempt ends there."""
        if (request_id, attempt) in self._submitted:
            self._commands.put_nowait(wire.cancel_command(request_id, attempt))

    def candidate(self, *, suspect: bool = False) -> Candidate:
        """The worker as placement sees it.

        What was sent since the last load is added to it. That load may have
        been on its way when something was sent, so the backlog is at least
        what this router knows to wait there.
        """
        reported = self.load.waiting_tokens + self._tokens_since_load
        own = sum(s.input_tokens for s in self._submitted.values() if not s.started)
        return Candidate(
            worker=self.endpoint.worker,
            pool_tokens=self.endpoint.pool_tokens,
            load=self.load,
            backlog_tokens=max(reported, own),
            suspect=suspect,
        )

    async def run(self) -> None:
        """Attaches, and again after every break, until cancelled."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            was_ready = await self._attach()
            delay = _FIRST_RETRY_SECONDS if was_ready else delay
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    async def _attach(self) -> bool:
        """Lives through one stream; returns whether it ever became ready."""
        self._commands = asyncio.Queue()
        self._commands.put_nowait(wire.hello_command(self._router_id, self.endpoint.incarnation))
        detail = "was detached"
        # A channel of its own for each stream: a channel's own pauses between
        # connection attempts would add to ours.
        async with self._open_channel() as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(_until_none(self._commands))
            try:
                async for response in call:
                    self._receive(response)
                detail = "closed its stream"
            except grpc.aio.AioRpcError as error:
                detail = f"{error.code().name}: {error.details()}"
            except Exception as error:  # costs this stream, not the link
                _log.exception("stream of %s", self.endpoint.worker)
                detail = f"router: {error}"
            finally:
                call.cancel()
                self._commands.put_nowait(None)
                was_ready = self.ready
                self._lose(detail)
        level = logging.WARNING if was_ready else logging.DEBUG
        _log.log(level, "%s (%s): %s", self.endpoint.worker, self.endpoint.incarnation, detail)
        return was_ready

    def _open_channel(self) -> grpc.aio.Channel:
        return worker_channel(self.endpoint.address, self._credentials, self._max_message_bytes)

    def _receive(self, response: worker_pb2.AttachResponse) -> None:
        if response.HasField("load"):
            before, self.load = self.load, wire.read_load(response.load)
            self._tokens_since_load = 0
            drains = self.load.draining and not self._drains
            self._drains |= drains
            if drains or self.load.peers != before.peers:
                self._on_change()
        if not self.ready:
            self._set_ready(True)
        for message in response.outputs:
            self._dispatch(wire.read_output(message))

    def _dispatch(self, output: WorkerOutput) -> None:
        key = (output.request_id, output.attempt)
        submitted = self._submitted.get(key)
        if submitted is None:
            if output.tokens:  # else it only says that it has let go
                self._on_stale()
            return
        submitted.started = True
        if output.end is not None:
            submitted.open_choices.discard(output.choice)
        if not submitted.open_choices:
            del self._submitted[key]
        submitted.listener.on_output(self.endpoint.role, output)

    def _lose(self, detail: str) -> None:
        lost, self._submitted = self._submitted, {}
        self.load, self._tokens_since_load = WorkerLoad(), 0
        if self.ready:
            self._set_ready(False)
        for submitted in lost.values():
            submitted.listener.on_lost(self.endpoint, detail)

    def _set_ready(self, ready: bool) -> None:
        self.ready = ready
        self.met = self.met or ready
        self._on_change()


async def _until_none(
    commands: asyncio.Queue[worker_pb2.AttachRequest | None],
) -> AsyncIterator[worker_pb2.AttachRequest]:
    while (command := await commands.get()) is not None:
        yield command
