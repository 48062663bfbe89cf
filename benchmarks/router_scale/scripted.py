"""What stands round the router: scripted workers, channels without a network, and clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.router_scale.load import Counts, Load, Script
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.worker.load_reports import PacedLink
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.load import PoolCounts, WorkerLoad
from kvrelay.wire.messages import ENGINE_OUTPUTS
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput, SampledToken
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

PAGE_SIZE = 16
POOL_PAGES = 8192
VOCAB = 512
STEP_SECONDS = 0.02
NO_OUTPUTS: Mapping[int, Sequence[RequestOutput]] = {}


@dataclass
class Stage:
    """What the scripts of one run share: the load, the clock's costs, who waits for whom."""

    load: Load
    script: Script = field(default_factory=Script)
    counts: Counts = field(default_factory=Counts)
    opening: set[str] = field(default_factory=set)
    """Requests that a thread of the router may be at work for."""
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)
    """By incarnation."""
    decodes: dict[str, ScriptedWorker] = field(default_factory=dict)
    """Who waits for a request's prompt."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of one prefill worker, so that all are busy for the load's share of the time."""
        load = self.load
        tokens = load.requests_per_second * load.input_tokens
        return max(tokens / (load.workers // 2) / load.utilization, 1000.0)


@dataclass
class Running:
    """A submission on a worker."""

    key: RequestKey
    input_tokens: int
    left: int
    """Tokens of its output, after the first."""
    link: RouterLink
    """Of its router."""
    index: int = 1


class ScriptedWorker:
    """Answers one link, in virtual time: computes nothing."""

    def __init__(self, stage: Stage, number: int, role: WorkerRole) -> None:
        self._stage = stage
        self._role = role
        self._loop = asyncio.get_running_loop()
        name = f"{role}-{number}"
        self.endpoint = WorkerInfo(
            name=name,
            role=role,
            incarnation=f"{name}-1",
            address="",
            metrics_address="",
            pool_tokens=POOL_PAGES * PAGE_SIZE,
            max_model_len=4096,
            vocab_size=VOCAB,
            architecture="Scripted",
            eos_token_ids=(),
            model=NO_MODEL,
            version=VERSION,
        )
        self._links: list[RouterLink] = []
        self._queue: deque[Running] = deque()
        self._pulls: dict[str, Running] = {}
        self._free_at = 0.0
        self._steps = False

    def attach(self) -> RouterLink:
        """One more router."""
        link = PacedLink("router") if self._stage.load.paced else RouterLink("router")
        self._links.append(link)
        return link

    async def responses(self, link: RouterLink) -> AsyncIterator[bytes]:
        """What it sends to a router."""
        self._report()
        async for step in link:
            with self._stage.script:
                self._stage.counts.loads += step.load is not None
                message = ENGINE_OUTPUTS.to_message(step.packed()).SerializeToString()
            yield message

    def take(self, raw: bytes, link: RouterLink) -> None:
        """Receives a router's command."""
        message = worker_pb2.AttachRequest.FromString(raw)
        if message.HasField("submit"):
            self._take_submit(message.submit, link)
        elif message.HasField("cancel"):
            self._pulls.pop(message.cancel.request_id, None)
        self._report()

    def _take_submit(self, submit: worker_pb2.SubmitRequest, link: RouterLink) -> None:
        now = self._loop.time()
        key = RequestKey("", submit.request_id, submit.attempt, submit.first_choice)
        tokens, left = len(submit.input_ids), submit.sampling_params.max_tokens - 1
        running = Running(key, tokens, left, link)
        if self._role is WorkerRole.DECODE:
            self._pulls[submit.request_id] = running
            self._stage.decodes[submit.request_id] = self
            self._stage.opening.discard(submit.request_id)
            return
        begins = max(now, self._free_at)
        self._stage.counts.waits.append(begins - now)
        self._free_at = begins + tokens / self._stage.prefill_tokens_per_second
        self._queue.append(running)
        self._loop.call_at(self._free_at, self._prefilled)

    def _prefilled(self) -> None:
        with self._stage.script:
            done = self._queue.popleft()
            end = RequestEnd(EndReason.HANDED_OVER if done.left else EndReason.LENGTH)
            self._report({id(done.link): [RequestOutput(done.key, 0, (SampledToken(7),), end)]})
            decode = self._stage.decodes.pop(done.key.request_id)
            if done.left:
                decode.begin(done.key.request_id)

    def begin(self, request_id: str) -> None:
        """The request's prompt is here."""
        self._queue.append(self._pulls.pop(request_id))
        self._report()
        if not self._steps:
            self._steps = True
            self._loop.call_later(STEP_SECONDS, self._step)

    def _step(self) -> None:
        with self._stage.script:
            outputs: dict[int, list[RequestOutput]] = {}
            for one in self._queue:
                one.left -= 1
                end = None if one.left else RequestEnd(EndReason.LENGTH)
                token = SampledToken(7 + one.index)
                output = RequestOutput(one.key, one.index, (token,), end)
                outputs.setdefault(id(one.link), []).append(output)
                one.index += 1
            self._queue = deque(one for one in self._queue if one.left)
            self._steps = bool(self._queue)
            self._report(outputs)
            if self._steps:
                self._loop.call_later(STEP_SECONDS, self._step)

    def _report(self, outputs: Mapping[int, Sequence[RequestOutput]] = NO_OUTPUTS) -> None:
        """Tells each router what its requests have got, and the load."""
        computed = sum(one.input_tokens for one in self._queue)
        pulled = sum(one.input_tokens for one in self._pulls.values())
        held = min(POOL_PAGES, computed // PAGE_SIZE)
        pool = PoolCounts("full", PAGE_SIZE, POOL_PAGES, POOL_PAGES - held, held, 0, 0, 0, 0, 0)
        rows = PoolCounts("rows", 0, 256, 256, 0, 0, 0, 0, 0, 0)
        prefills = self._role is WorkerRole.PREFILL
        load = WorkerLoad(
            waiting_requests=len(self._queue if prefills else self._pulls),
            running_requests=0 if prefills else len(self._queue),
            waiting_tokens=computed if prefills else pulled,
            pools=(pool, rows),
        )
        for link in self._links:
            link.deliver(EngineOutputs(tuple(outputs.get(id(link), ())), load))


class Loopback:
    """A channel whose only stream ends at a scripted worker."""

    def __init__(self, stage: Stage, worker: ScriptedWorker) -> None:
        self._stage = stage
        self._worker = worker

    async def __aenter__(self) -> Loopback:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def unary_unary(self, *_: object, **__: object) -> None:
        """Nothing of that kind is called."""

    def stream_stream(
        self,
        _path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[[AsyncIterator[Any]], LoopbackCall]:
        """How a stub makes its Attach."""

        async def send(requests: AsyncIterator[Any], link: RouterLink) -> None:
            async for message in requests:
                raw = request_serializer(message)
                with self._stage.script:
                    self._worker.take(raw, link)

        def attach(requests: AsyncIterator[Any]) -> LoopbackCall:
            link = self._worker.attach()
            sending = asyncio.create_task(send(requests, link))
            return LoopbackCall(self._worker.responses(link), response_deserializer, sending)

        return attach


class LoopbackCall:
    """An Attach stream."""

    def __init__(
        self,
        responses: AsyncIterator[bytes],
        deserialize: Callable[[bytes], Any],
        sending: asyncio.Task[None],
    ) -> None:
        self._responses = responses
        self._deserialize = deserialize
        self._sending = sending

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for raw in self._responses:
            yield self._deserialize(raw)

    def cancel(self) -> None:
        """Ends it."""
        self._sending.cancel()


class ScriptedLink(WorkerLink):
    """A link without a network."""

    def __init__(self, stage: Stage, endpoint: WorkerInfo, on_change: Any, prefixes: Any) -> None:
        super().__init__(
            endpoint,
            router_id="router",
            credentials=None,
            max_message_bytes=1 << 20,
            on_change=on_change,
            on_stale=lambda: None,
            on_killed=lambda output: None,
            prefixes=prefixes,
        )
        self._stage = stage

    def _open_channel(self) -> Any:
        return Loopback(self._stage, self._stage.workers[self.endpoint.incarnation])


class Caller:
    """A client's call, as the service sees it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def time_remaining(self) -> None:
        """There is no deadline."""

    async def write(self, event: bytes | pb.GenerateResponse) -> None:
        """Sends an event."""
        if not isinstance(event, bytes):
            event.SerializeToString()
        self._stage.counts.tokens += 1

    async def abort(self, code: Any, detail: str, _trailers: object) -> None:
        """No call may fail."""
        raise AssertionError(f"{code}: {detail}")
