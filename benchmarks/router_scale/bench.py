"""One run: a router, its workers and its clients, in virtual time."""

from __future__ import annotations

import asyncio
import cProfile
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from benchmarks.router_scale.load import Counts, Figure, Load
from benchmarks.router_scale.scripted import VOCAB, Caller, ScriptedLink, ScriptedWorker, Stage
from benchmarks.virtual_time import VirtualLoop
from kvrelay.router.access.auth import set_caller
from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.session_adoption import SessionAdoption
from kvrelay.router.admission.structured_outputs import StructuredOutputs
from kvrelay.router.admission.tokenizer_threads import TextThreads
from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.doors.grpc_service import InferenceService
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.placement.choose import PlacementRules
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.sessions import Sessions
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

WARM_UP_SECONDS = 1.0


class Bench:
    """A router, its workers and its clients, for one run."""

    def __init__(self, load: Load, model_path: Path, tokenizer: Tokenizer) -> None:
        self.load = load
        self.stage = Stage(load)
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
            ScriptedWorker(self.stage, number, role)
            for role in roles
            for number in range(self.load.workers // 2)
        ]
        self.stage.workers = {worker.endpoint.incarnation: worker for worker in made}
        discovery = StaticDiscovery([worker.endpoint for worker in made])
        services, running = [], []
        threads = TextThreads(self._config.max_text_bytes, self._config.retry_after_ms)
        for _ in range(self.load.routers):
            metrics = RouterMetrics("scripted")
            prefixes = KnownPrefixes(self._config.prefix_index_entries)
            make_link = functools.partial(self._make_link, prefixes)
            fleet = Fleet(discovery, make_link, prefixes, PlacementRules())
            live = LiveRequests(self._config, fleet, self._tokenizer, metrics)
            texts = Texts(self._tokenizer, 16, threads)
            structured = StructuredOutputs(self._tokenizer, fleet, metrics)
            sessions = Sessions(self._config, metrics, fleet.forget_session)
            admission = Admission(
                self._config, fleet, live, texts, metrics, Seeds.of_file(None), structured, sessions
            )
            info = ServerInfo(fleet, live, metrics, sessions)
            adoption = SessionAdoption(sessions, fleet, metrics)
            services.append(
                InferenceService(
                    self._config, fleet, live, admission, texts, metrics, info, sessions, adoption
                )
            )
            running.append(asyncio.create_task(fleet.run()))
            while not (fleet.links and all(link.ready for link in fleet.links)):
                await fleet.changes.wait()
        clients = asyncio.create_task(self._send(services))
        await asyncio.sleep(WARM_UP_SECONDS)
        self.stage.counts, self.stage.script.seconds = Counts(), 0.0
        begun = time.process_time()
        if profile is not None:
            profile.enable()
        await asyncio.sleep(self.load.seconds)
        if profile is not None:
            profile.disable()
        seconds = time.process_time() - begun - self.stage.script.seconds
        counts = self.stage.counts
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
        return ScriptedLink(self.stage, endpoint, on_change, prefixes)

    async def _end(self, calls: Sequence[asyncio.Task[None]]) -> None:
        """Ends the calls that are open; raises what one has failed with."""
        for call in calls:
            call.cancel()
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _send(self, services: Sequence[InferenceService]) -> None:
        set_caller(ANYBODY)
        rng, loop = random.Random(0), asyncio.get_running_loop()
        due, number = loop.time(), 0
        while self.load.requests_per_second:
            due += rng.expovariate(self.load.requests_per_second)
            await asyncio.sleep(due - loop.time())
            with self.stage.script:
                number += 1
                self.stage.counts.requests += 1
                message = pb.GenerateRequest(request_id=str(number))
                length = rng.randrange(self.load.input_tokens // 8, 2 * self.load.input_tokens)
                ids = [rng.randrange(VOCAB) for _ in range(length)]
                message.input_ids.ids.extend(ids)
                message.sampling_params.max_tokens = self.load.output_tokens
                raw = message.SerializeToString()
                self.stage.opening.add(str(number))
            answer: Any = rng.choice(services).Generate(raw, Caller(self.stage))
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
        with asyncio.Runner(
            loop_factory=lambda: VirtualLoop(lambda: bool(bench.stage.opening))
        ) as loop:
            return loop.run(bench.run(profile))
