"""The router's stream to one incarnation of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import grpc

from kvrelay.net.channels import worker_channel
from kvrelay.net.tls import CurrentTls
from kvrelay.router.generation import Submission
from kvrelay.router.placement.estimate import ExpectedPrompts
from kvrelay.router.placement.known_prefixes import ExpectedMarks, KnownPrefixes
from kvrelay.router.placement.ranking import Candidate
from kvrelay.router.placement.sent_prompts import SentPrompt, SentPrompts
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.load import WorkerLoad, WorkerStatus
from kvrelay.wire.messages import ATTACH_REQUEST, ENGINE_OUTPUTS
from kvrelay.wire.output import EngineOutputs, FailureReason, NextTokens, RequestOutput
from kvrelay.wire.request_progress import RequestProgress
from kvrelay.wire.submit import (
    AttachHello,
    AttachRequest,
    CancelRequest,
    ForgetSessionRequest,
    RequestKey,
    RouterCommand,
    TellPrefixesRequest,
    WatchRequests,
)
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 5.0

FORWARD_FAILURES: Final = {FailureReason.FORWARD_FAILED, FailureReason.FORWARD_FAILED_ALONE}
"""The causes of an end for which a whole forward has failed, whoever is to blame."""


class AttemptListener(Protocol):
    """A receiver of the reports on the attempts that were submitted with it."""

    def on_output(self, role: WorkerRole, output: RequestOutput) -> None:
        """Take tokens that the worker of this role produced for a choice, or the choice's end."""
        ...

    def on_token(
        self, role: WorkerRole, attempt: int, choice: int, index: int, token_id: int
    ) -> None:
        """Take one token without an end; else like `on_output`."""
        ...

    def on_lost(self, attempt: int, endpoint: WorkerInfo, detail: str) -> None:
        """Take the loss of the worker, which has released this attempt, or died with it."""
        ...


@dataclass(slots=True)
class _Submitted:
    """An attempt that the worker has not ended and that was not cancelled."""

    request_id: str
    listener: AttemptListener
    prompt: SentPrompt
    expected: ExpectedMarks | None
    """The marks of the prompt's prefixes that the worker is expected to have."""
    open_choices: set[int]
    """The choices that the worker has not ended."""


class WorkerLink:
    """An Attach stream to one worker incarnation, with the attempts submitted on it.

    The stream is the lease on all submitted attempts. When it breaks, the worker releases them, and
    every listener gets `on_lost`. A link is ready from the first message of a stream, which brings
    the worker's load, to the stream's end.

    Args:
        endpoint: the incarnation; another one at the same address refuses the stream.
        router_id: this router's id, for the worker.
        credentials: the credentials for the worker; None: plain text.
        max_message_bytes: the largest message, each way.
        on_change: called when `ready`, `draining` or `candidate` has changed.
        on_stale: called for each output with tokens of an attempt that is unknown here.
        on_killed: called with the end of an attempt whose forward killed the earlier incarnation.
        prefixes: learns the prefixes that the worker has, and is to have.
        on_ended_sessions: called with the incarnation and the names of sessions whose KV the worker
            has given up.
        on_detached: called with the incarnation when a stream has ended, after the listeners.
        on_expected_hit: called for each prompt with the role and the tokens that the worker is
            expected to have already.
    """

    def __init__(
        self,
        endpoint: WorkerInfo,
        *,
        router_id: str,
        credentials: CurrentTls | None,
        max_message_bytes: int,
        on_change: Callable[[WorkerLink], None],
        on_stale: Callable[[], None],
        on_killed: Callable[[RequestOutput], None],
        prefixes: KnownPrefixes,
        on_ended_sessions: Callable[[str, Sequence[str]], None] = lambda incarnation, names: None,
        on_detached: Callable[[str], None] = lambda incarnation: None,
        on_expected_hit: Callable[[WorkerRole, int], None] = lambda role, tokens: None,
    ) -> None:
        self.endpoint = endpoint
        self.ready = False
        self.refusal = ""
        """Why the worker gets no requests, though it may be ready; empty if it gets some."""
        self.load = WorkerLoad()
        self._reported_draining = False
        self._router_id = router_id
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._on_change = on_change
        self._on_stale = on_stale
        self._on_killed = on_killed
        self._prefixes = prefixes
        self._on_ended_sessions = on_ended_sessions
        self._on_detached = on_detached
        self._on_expected_hit = on_expected_hit
        self._submitted: dict[int, _Submitted] = {}
        """The submitted attempts, by their numbers."""
        self._commands: asyncio.Queue[worker_pb2.AttachRequest | None] = asyncio.Queue()
        self._sent = SentPrompts()
        self._to_forget: list[str] = []
        """Names of sessions that ended while the worker was not attached."""
        self._channel: grpc.aio.Channel | None = None
        """The channel of the present stream."""
        self._watching = False
        self._progress: tuple[RequestProgress, ...] = ()

    def watch(self, *, on: bool) -> None:
        """Ask the worker for the progress of its requests, or for no more; now and on new streams.

        Do nothing if that was asked already.
        """
        if on is self._watching:
            return
        self._watching, self._progress = on, ()
        self._commands.put_nowait(_message(WatchRequests(on)))

    @property
    def progress(self) -> list[tuple[str, RequestProgress]]:
        """The ids of requests that live here, and their latest progress."""
        return [
            (submitted.request_id, one)
            for one in self._progress
            if (submitted := self._submitted.get(one.attempt)) is not None
        ]

    @property
    def draining(self) -> bool:
        """Whether worker or discovery has reported that it takes no more requests; never reset."""
        return self._reported_draining or self.endpoint.draining

    @property
    def status(self) -> WorkerStatus:
        """The worker's status for operators."""
        return WorkerStatus(
            worker=self.endpoint.name,
            role=self.endpoint.role,
            incarnation=self.endpoint.incarnation,
            address=self.endpoint.address,
            metrics_address=self.endpoint.metrics_address,
            ready=self.ready,
            draining=self.draining,
            load=self.load,
            model_digest=self.endpoint.model.name,
            refusal=self.refusal,
            kv_events_address=self.endpoint.kv_events_address,
        )

    def submit(
        self,
        submission: Submission,
        listener: AttemptListener,
        prefill: WorkerInfo | None = None,
        lent_tokens: int = 0,
    ) -> None:
        """Send an attempt to the worker, which must be ready. Does not block.

        Args:
            submission: the attempt.
            listener: receives the worker's reports on it.
            prefill: the worker that computes the input; None: this worker does.
            lent_tokens: tokens of the input that this worker is expected to read before it
                computes.
        """
        assert self.ready, f"{self.endpoint.name} is not ready"
        role, input_tokens = self.endpoint.role, submission.input_len
        cached, expected = min(lent_tokens, input_tokens - 1), None
        if prefill is not None or role not in submission.in_full_on:
            cached = max(cached, self._expect_cached(submission))
        if marks := submission.request.marks:
            expected = self._prefixes.expect(self.endpoint.incarnation, marks)
        # On a worker that generates, cached tokens take room like the others.
        room_tokens = input_tokens - cached * (role is WorkerRole.PREFILL)
        computed_first = submission.request.priority <= 0 and prefill is None
        prompt = SentPrompt(room_tokens, (input_tokens - cached) * computed_first)
        self._submitted[submission.attempt] = _Submitted(
            submission.request_id, listener, prompt, expected, set(submission.choices)
        )
        self._sent.send(prompt)
        command = submission.to_worker(role, prefill, cached)
        self._commands.put_nowait(_message(command))
        self._on_change(self)

    def _expect_cached(self, submission: Submission) -> int:
        """The tokens of a prompt that the worker is expected to have, by its prefixes or session.

        Reports what is expected of the prefixes.
        """
        incarnation, most = self.endpoint.incarnation, submission.input_len - 1
        kept = min(submission.kept_on(incarnation), most)
        if not (marks := submission.request.marks):
            return kept
        hit = min(self._prefixes.hit_tokens(incarnation, marks), most)
        self._on_expected_hit(self.endpoint.role, hit)
        return max(hit, kept)

    def forget_session(self, name: str) -> None:
        """Tell the worker to keep nothing of a session, now or when it is attached again."""
        if self.ready:
            self._commands.put_nowait(_message(ForgetSessionRequest(name)))
        else:
            self._to_forget.append(name)

    async def find_history(self, owner: str, digest: str, seconds: float) -> array[int]:
        """Ask the worker for the history of a session of this owner; empty: it has none.

        Raises `AioRpcError` if it does not answer in time, or leaves meanwhile.
        """
        request = worker_pb2.FindHistoryRequest(owner=owner, digest=digest)
        own = self._channel  # that of the stream; a new one would cost a handshake
        async with self._open_channel() if own is None else contextlib.nullcontext(own) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                answer = await stub.FindHistory(request, timeout=seconds)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise _channel_has_ended() from None
        return array("I", answer.token_ids)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Tell the worker to abort the attempt; do nothing if it has ended there.

        Its listener gets no more reports.
        """
        submitted = self._submitted.pop(attempt, None)
        if submitted is not None:
            self._commands.put_nowait(_cancel(request_id, attempt))
            self._forget(submitted)

    def ask_to_end(self, request_id: str, attempt: int) -> None:
        """Tell the worker to abort the attempt; its listener still gets the remaining reports."""
        if attempt in self._submitted:
            self._commands.put_nowait(_cancel(request_id, attempt))

    @property
    def candidate(self) -> Candidate:
        """The worker and its load, for placement; see `SentPrompts`."""
        reported = self.load.waiting_tokens
        return Candidate(
            worker=self.endpoint.name,
            incarnation=self.endpoint.incarnation,
            pool_tokens=self.endpoint.pool_tokens,
            load=self.load,
            backlog_tokens=self._sent.waiting_room(reported),
            pending_tokens=self._sent.pending_room(reported),
            num_requests=max(
                self.load.waiting_requests + self.load.running_requests, len(self._submitted)
            ),
            locality=self.endpoint.locality,
        )

    @property
    def prompt_queue(self) -> ExpectedPrompts:
        """The prompts that the worker has to compute, for estimates."""
        backlog = self._sent.waiting_work(sum(self.load.prompts_by_size))
        return ExpectedPrompts(self.endpoint.role, self.load, self._sent.since_load, backlog)

    async def run(self) -> None:
        """Attach to the worker, again after every break, until cancelled."""
        delay, task = _FIRST_RETRY_SECONDS, asyncio.current_task()
        while True:
            was_ready = await self._attach()
            if task is not None and task.cancelling():
                # gRPC swallows a cancellation that comes while a connection is refused.
                raise asyncio.CancelledError
            delay = _FIRST_RETRY_SECONDS if was_ready else delay
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    async def _attach(self) -> bool:
        """Run one stream to its end; return whether it became ready."""
        self._commands = asyncio.Queue()
        hello = AttachHello(self._router_id, self.endpoint.incarnation, VERSION)
        self._commands.put_nowait(_message(hello))
        if self._watching:
            self._commands.put_nowait(_message(WatchRequests(on=True)))
        detail = "was detached"
        # A channel of its own for each stream: a channel's own pauses between
        # connection attempts would add to ours.
        async with self._open_channel() as channel:
            self._channel = channel
            call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(_until_none(self._commands))
            try:
                async for response in call:
                    self._receive(response)
                detail = "closed its stream"
            except grpc.aio.AioRpcError as error:
                detail = f"{error.code().name}: {error.details()}"
            except Exception as error:  # costs this stream, not the link
                _log.exception("stream of %s", self.endpoint.name)
                detail = f"router: {error}"
            finally:
                self._channel = None
                call.cancel()
                self._commands.put_nowait(None)
                was_ready = self.ready
                self._end_stream(detail)
        level = logging.WARNING if was_ready else logging.DEBUG
        _log.log(level, "%s (%s): %s", self.endpoint.name, self.endpoint.incarnation, detail)
        return was_ready

    def _open_channel(self) -> grpc.aio.Channel:
        return worker_channel(self.endpoint.address, self._credentials, self._max_message_bytes)

    def _receive(self, response: worker_pb2.AttachResponse) -> None:
        step = ENGINE_OUTPUTS.from_message(response)
        if step.load is not None:
            self._take_load(step)
        if step.load is not None or not self.ready:
            self.ready = True
            self._on_change(self)
        names, self._to_forget = self._to_forget, []
        for name in names:
            self.forget_session(name)
        if step.progress is not None:
            self._progress = step.progress.requests
        if step.prefixes is not None and self._prefixes.take(self.endpoint, step.prefixes):
            self._commands.put_nowait(_message(TellPrefixesRequest()))
        if step.next_tokens is not None:
            self._dispatch_tokens(step.next_tokens)
        for output in step.outputs:
            self._dispatch(output)
        if step.ended_sessions:
            self._on_ended_sessions(self.endpoint.incarnation, step.ended_sessions)

    def _take_load(self, step: EngineOutputs) -> None:
        assert step.load is not None
        peers = self.load.peers
        if step.peers or step.gone_peers:
            kept = {peer.incarnation: peer for peer in peers}
            for incarnation in step.gone_peers:
                kept.pop(incarnation, None)
            kept |= {peer.incarnation: peer for peer in step.peers}
            peers = tuple(kept.values())
        self.load = replace(step.load, peers=peers)
        self._sent.take_load()
        self._reported_draining |= self.load.draining

    def _dispatch(self, output: RequestOutput) -> None:
        submitted = self._find(output.key)
        if submitted is None:
            if output.tokens:  # else it only reports that the attempt has ended
                self._on_stale()
            if output.end is not None and output.end.cause in FORWARD_FAILURES:
                self._on_killed(output)
            return
        if not submitted.prompt.started and (output.tokens or output.end):
            self._begin(submitted)
        if output.end is not None:
            submitted.open_choices.discard(output.key.choice)
        if not submitted.open_choices:
            del self._submitted[output.key.attempt]
            self._forget(submitted)
        submitted.listener.on_output(self.endpoint.role, output)

    def _dispatch_tokens(self, tokens: NextTokens) -> None:
        role = self.endpoint.role
        for attempt, choice, index, token_id in tokens:
            submitted = self._submitted.get(attempt)
            if submitted is None:
                self._on_stale()
                continue
            if not submitted.prompt.started:
                self._begin(submitted)
            submitted.listener.on_token(role, attempt, choice, index, token_id)

    def _find(self, key: RequestKey) -> _Submitted | None:
        """The attempt of this key; None: none here, or of another request."""
        submitted = self._submitted.get(key.attempt)
        return submitted if submitted and submitted.request_id == key.request_id else None

    def _begin(self, submitted: _Submitted) -> None:
        """Note that an attempt's prompt waits no longer."""
        self._sent.begin(submitted.prompt)
        self._on_change(self)

    def _forget(self, submitted: _Submitted) -> None:
        """Forget an attempt that is over here."""
        self._sent.end(submitted.prompt)
        if submitted.expected is not None:
            self._prefixes.settle(submitted.expected)
        self._on_change(self)

    def _end_stream(self, detail: str) -> None:
        lost, self._submitted = self._submitted, {}
        self.load, self.ready = WorkerLoad(), False
        self._sent = SentPrompts()
        self._prefixes.forget(self.endpoint.incarnation)
        self._on_change(self)
        for attempt, submitted in lost.items():
            submitted.listener.on_lost(attempt, self.endpoint, detail)
        self._on_detached(self.endpoint.incarnation)


def _message(command: RouterCommand) -> worker_pb2.AttachRequest:
    return ATTACH_REQUEST.to_message(AttachRequest(command))


def _cancel(request_id: str, attempt: int) -> worker_pb2.AttachRequest:
    """The command by which the worker gives the attempt up."""
    return _message(CancelRequest(RequestKey("", request_id, attempt)))


async def _until_none(
    commands: asyncio.Queue[worker_pb2.AttachRequest | None],
) -> AsyncIterator[worker_pb2.AttachRequest]:
    while (command := await commands.get()) is not None:
        yield command


def _channel_has_ended() -> grpc.aio.AioRpcError:
    """The error of a call whose channel was closed here: grpc itself cancels whoever waits."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the stream ended")
