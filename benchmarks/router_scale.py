"""What a router costs with a thousand workers, on one core.

python -m benchmarks.router_scale

The router's own code is the real one from a client's bytes to a client's bytes: parsing,
validation, placement, submissions, outputs, text, events; and so is the pacing of the workers'
loads. Only the network is missing: each link's stream ends at a scripted worker in this process,
and calls are made on the service itself, so what gRPC costs is left out.

Time is virtual: requests come at random at the given rate, a prefill worker computes prompts one
after the other, a decode worker gives each of its requests a token a step, and the clock jumps
from one event to the next. What is measured is the CPU time of this process, less that of the
scripts: "cores" is CPU seconds for each virtual second, so above 1 one router cannot keep up.
The costs of a request, of a token and of a load are differences between runs.

A request waits for prefill because others are before it; how long shows what placement is
worth. Loads "at once" are told at every step, as if they cost nothing.
"""

from __future__ import annotations

import asyncio
import cProfile
import functools
import json
import pstats
import random
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer, models

from benchmarks.virtual_time import VirtualLoop
from kvrelay.deploy.load_generator.table import table
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.worker.load_reports import PacedLink
from kvrelay.router.admission import Admission
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.fleet import Fleet
from kvrelay.router.known_prefixes import KnownPrefixes
from kvrelay.router.live_requests import LiveRequests
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.seeds import Seeds
from kvrelay.router.server_info import ServerInfo
from kvrelay.router.service import InferenceService
from kvrelay.router.structured_outputs import StructuredOutputs
from kvrelay.router.text_threads import TextThreads
from kvrelay.router.texts import Texts
from kvrelay.router.worker_link import WorkerLink
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.load import PoolCounts, WorkerLoad
from kvrelay.wire.messages import ENGINE_OUTPUTS
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput, SampledToken
from kvrelay.wire.request import RequestKey
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

PAGE_SIZE = 16
POOL_PAGES = 8192
VOCAB = 512
STEP_SECONDS = 0.02
WARM_UP_SECONDS = 1.0
NO_OUTPUTS: Mapping[int, Sequence[RequestOutput]] = {}


@dataclass(frozen=True)
class Load:
    """What the router has to do."""

    workers: int
    """Half of them prefill, half of them decode."""
    requests_per_second: float
    input_tokens: int = 240
    """About the mean; from an eighth of it to twice as many."""
    output_tokens: int = 16
    seconds: float = 4.0
    """Virtual ones, that are measured."""
    utilization: float = 0.9
    """Of the prefill workers."""
    routers: int = 1
    """That requests come to at random; none knows what the others send."""
    paced: bool = True
    """Loads are told as real workers tell them; else at once, at every step."""


@dataclass(frozen=True)
class Figure:
    """What one run has cost."""

    load: Load
    requests: int
    tokens: int
    loads: int
    cores: float
    """CPU seconds of the routers a virtual second."""
    wait_ms_mean: float
    """Virtual ones, of requests for a prefill worker that computes others."""
    wait_ms_p99: float


class Script:
    """The CPU seconds of what is not the router: scripted workers and clients, and this clock.

    ``with script:`` around what is to count; blocks are not nested.
    """

    def __init__(self) -> None:
        self.seconds = self._own_seconds = self._begun = 0.0
        begun = time.thread_time()
        for _ in range(1000):
            with self:
                pass
        self._own_seconds = (time.thread_time() - begun - self.seconds) / 1000
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._begun + self._own_seconds


@dataclass
class Counts:
    """What has happened since the last reset."""

    requests: int = 0
    tokens: int = 0
    loads: int = 0
    waits: list[float] = field(default_factory=list)


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

    def __init__(self, bench: Bench, number: int, role: WorkerRole) -> None:
        self._bench = bench
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
            model=bench.model,
            version=VERSION,
        )
        self._links: list[RouterLink] = []
        self._queue: deque[Running] = deque()
        self._pulls: dict[str, Running] = {}
        self._free_at = 0.0
        self._steps = False

    def attach(self) -> RouterLink:
        """One more router."""
        link = PacedLink("router") if self._bench.load.paced else RouterLink("router")
        self._links.append(link)
        return link

    async def responses(self, link: RouterLink) -> AsyncIterator[bytes]:
        """What it sends to a router."""
        self._report()
        async for step in link:
            with self._bench.script:
                self._bench.counts.loads += step.load is not None
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
            self._bench.decodes[submit.request_id] = self
            self._bench.opening.discard(submit.request_id)
            return
        begins = max(now, self._free_at)
        self._bench.counts.waits.append(begins - now)
        self._free_at = begins + tokens / self._bench.prefill_tokens_per_second
        self._queue.append(running)
        self._loop.call_at(self._free_at, self._prefilled)

    def _prefilled(self) -> None:
        with self._bench.script:
            done = self._queue.popleft()
            end = RequestEnd(EndReason.HANDED_OVER if done.left else EndReason.LENGTH)
            self._report({id(done.link): [RequestOutput(done.key, 0, (SampledToken(7),), end)]})
            decode = self._bench.decodes.pop(done.key.request_id)
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
        with self._bench.script:
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

    def __init__(self, bench: Bench, worker: ScriptedWorker) -> None:
        self._bench = bench
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
                with self._bench.script:
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

    def __init__(self, bench: Bench, endpoint: WorkerInfo, on_change: Any, prefixes: Any) -> None:
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
        self._bench = bench

    def _open_channel(self) -> Any:
        return Loopback(self._bench, self._bench.workers[self.endpoint.incarnation])


class Caller:
    """A client's call, as the service sees it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def time_remaining(self) -> None:
        """There is no deadline."""

    async def write(self, event: bytes | pb.GenerateResponse) -> None:
        """Sends an event."""
        if not isinstance(event, bytes):
            event.SerializeToString()
        self._bench.counts.tokens += 1

    async def abort(self, code: Any, detail: str, _trailers: object) -> None:
        """No call may fail."""
        raise AssertionError(f"{code}: {detail}")


class Bench:
    """A router, its workers and its clients, for one run."""

    def __init__(self, load: Load, model_path: Path, tokenizer: Tokenizer) -> None:
        self.load = load
        self.model = NO_MODEL
        self.script = Script()
        self.counts = Counts()
        self.opening: set[str] = set()
        """Requests that a thread of the router may be at work for."""
        prefills = load.workers // 2
        tokens = load.requests_per_second * load.input_tokens
        self.prefill_tokens_per_second = max(tokens / prefills / load.utilization, 1000.0)
        self.workers: dict[str, ScriptedWorker] = {}
        self.decodes: dict[str, ScriptedWorker] = {}
        """Who waits for a request's prompt."""
        self._calls: set[asyncio.Task[None]] = set()
        self._tokenizer = tokenizer
        self._config = RouterConfig(
            model_name="scripted",
            model_path=model_path,
            dtype="none",
            grpc_address="",
            metrics_address="",
            max_live_requests=1 << 20,
        )

    async def run(self, profile: cProfile.Profile | None = None) -> Figure:
        """Serves the load, first unmeasured until it is steady."""
        roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
        made = [
            ScriptedWorker(self, number, role)
            for role in roles
            for number in range(self.load.workers // 2)
        ]
        self.workers = {worker.endpoint.incarnation: worker for worker in made}
        discovery = StaticDiscovery([worker.endpoint for worker in made])
        services, running = [], []
        threads = TextThreads(self._config.max_text_bytes, self._config.retry_after_ms)
        for _ in range(self.load.routers):
            metrics = RouterMetrics("scripted")
            prefixes = KnownPrefixes(self._config.prefix_index_entries)
            fleet = Fleet(discovery, functools.partial(self._make_link, prefixes), prefixes)
            live = LiveRequests(self._config, fleet, self._tokenizer, metrics)
            texts = Texts(self._tokenizer, 16, threads)
            structured = StructuredOutputs(self._tokenizer, fleet, metrics)
            admission = Admission(
                self._config, fleet, live, texts, metrics, Seeds.of_file(None), structured
            )
            info = ServerInfo(fleet, live, metrics)
            services.append(
                InferenceService(self._config, fleet, live, admission, texts, metrics, info)
            )
            running.append(asyncio.create_task(fleet.run()))
            while not (fleet.links and all(link.ready for link in fleet.links)):
                await fleet.changes.wait()
        clients = asyncio.create_task(self._send(services))
        await asyncio.sleep(WARM_UP_SECONDS)
        self.counts, self.script.seconds = Counts(), 0.0
        begun = time.process_time()
        if profile is not None:
            profile.enable()
        await asyncio.sleep(self.load.seconds)
        if profile is not None:
            profile.disable()
        seconds = time.process_time() - begun - self.script.seconds
        counts = self.counts
        clients.cancel()
        await self._end(list(self._calls))
        for task in running:
            task.cancel()
        await asyncio.gather(clients, *running, return_exceptions=True)
        threads.close()
        return self._figure(counts, seconds)

    def _make_link(
        self, prefixes: KnownPrefixes, endpoint: WorkerInfo, on_change: Callable[[WorkerLink], None]
    ) -> WorkerLink:
        return ScriptedLink(self, endpoint, on_change, prefixes)

    async def _end(self, calls: Sequence[asyncio.Task[None]]) -> None:
        """Ends the calls that are open; raises what one has failed with."""
        for call in calls:
            call.cancel()
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _send(self, services: Sequence[InferenceService]) -> None:
        rng, loop = random.Random(0), asyncio.get_running_loop()
        due, number = loop.time(), 0
        while self.load.requests_per_second:
            due += rng.expovariate(self.load.requests_per_second)
            await asyncio.sleep(due - loop.time())
            with self.script:
                number += 1
                self.counts.requests += 1
                message = pb.GenerateRequest(request_id=str(number))
                length = rng.randrange(self.load.input_tokens // 8, 2 * self.load.input_tokens)
                ids = [rng.randrange(VOCAB) for _ in range(length)]
                message.input_ids.ids.extend(ids)
                message.sampling_params.max_tokens = self.load.output_tokens
                raw = message.SerializeToString()
                self.opening.add(str(number))
            answer: Any = rng.choice(services).Generate(raw, Caller(self))
            call: asyncio.Task[None] = asyncio.create_task(answer)
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        if call.cancelled() or call.exception() is None:
            self._calls.discard(call)  # one that failed is found at the end

    def _figure(self, counts: Counts, seconds: float) -> Figure:
        waits = sorted(1e3 * wait for wait in counts.waits) or [0.0]
        return Figure(
            load=self.load,
            requests=counts.requests,
            tokens=counts.tokens,
            loads=counts.loads,
            cores=seconds / self.load.seconds,
            wait_ms_mean=statistics.fmean(waits),
            wait_ms_p99=waits[int(0.99 * (len(waits) - 1))],
        )


def measure(load: Load, profile: cProfile.Profile | None = None) -> Figure:
    """One run, in virtual time."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n} ": n for n in range(VOCAB)}))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load, Path(folder), tokenizer)
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: bool(bench.opening))) as loop:
            return loop.run(bench.run(profile))


def by_component(profile: cProfile.Profile) -> list[tuple[str, float]]:
    """The share of the CPU time in each file, or library; those of the scripts are left out."""
    stats: Any = pstats.Stats(profile)
    seconds: Counter[str] = Counter()
    for (path, _, name), (_, _, own, _, _) in stats.stats.items():
        if "benchmarks" not in path and "thread_time" not in name:
            seconds[_component(path, name)] += own
    total = sum(seconds.values())
    return [(name, own / total) for name, own in seconds.most_common()]


def _component(path: str, name: str) -> str:
    for library in ("asyncio", "tokenizers", "prometheus_client", "google", "grpc"):
        if f"/{library}/" in path or library in name:
            return library
    parts = Path(path).parts
    if "kvrelay" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("kvrelay") :])
    return "others" if path != "~" else "built in: " + name.strip("<>").split(" of ")[-1][:40]


def costs(figures: Sequence[Figure]) -> dict[str, float]:
    """Microseconds of a load, a request and a token: differences between the first four runs."""
    idle, short, long, _ = figures[:4]
    token = 1e6 * (long.cores - short.cores) * short.load.seconds / (long.tokens - short.tokens)
    return {
        "idle, of a core": idle.cores,
        "a request of one token, with its loads": 1e6
        * (short.cores - idle.cores)
        * short.load.seconds
        / short.requests,
        "a further token": token,
    }


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=1000, help="Half of them prefill.")
@click.option("--rate", default=2000.0, help="Requests a second.")
@click.option("--output-tokens", default=16, help="Of each request.")
@click.option("--seconds", default=4.0, help="Virtual ones, of each run.")
@click.option("--profile", is_flag=True, help="Print shares by component, too; it takes longer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    workers: int, rate: float, output_tokens: int, seconds: float, profile: bool, as_json: bool
) -> None:
    """Print what the router costs, and how long requests wait for prefill."""
    loads = [
        Load(workers, 0.0, seconds=seconds),
        Load(workers, rate, output_tokens=1, seconds=seconds),
        Load(workers, rate, output_tokens=output_tokens, seconds=seconds),
        Load(workers, rate, output_tokens=output_tokens, seconds=seconds, paced=False),
        Load(16, rate, output_tokens=output_tokens, seconds=seconds),
        Load(16, rate, output_tokens=output_tokens, seconds=seconds, paced=False),
        Load(16, rate / 10, output_tokens=1, seconds=10 * seconds, routers=4),
        Load(16, rate / 10, output_tokens=1, seconds=10 * seconds, routers=4, paced=False),
    ]
    figures = [measure(load) for load in loads]
    if as_json:
        click.echo(json.dumps([asdict(figure) for figure in figures]))
        return
    header = (
        "workers",
        "routers",
        "rate",
        "tokens",
        "loads told",
        "loads/s",
        "cores",
        "wait ms",
        "p99",
    )
    click.echo(table(header, [_row(figure) for figure in figures]))
    for name, cost in costs(figures).items():
        click.echo(f"{name}: {cost:.3g}" + ("" if "core" in name else " µs"))
    if profile:
        profiled = cProfile.Profile()
        measure(loads[2], profiled)
        for name, share in by_component(profiled)[:25]:
            click.echo(f"{share:6.1%}  {name}")


def _row(figure: Figure) -> list[str]:
    load = figure.load
    return [
        str(load.workers),
        str(load.routers),
        f"{load.requests_per_second:g}",
        str(load.output_tokens),
        "paced" if load.paced else "at once",
        f"{figure.loads / load.seconds:.0f}",
        f"{figure.cores:.2f}",
        f"{figure.wait_ms_mean:.1f}",
        f"{figure.wait_ms_p99:.1f}",
    ]


if __name__ == "__main__":
    main()
