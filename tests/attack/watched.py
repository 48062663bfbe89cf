"""What another caller sees of a router under attack, and what the attack costs its processes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.attack.bounds import BOUNDS

MIB: Final = 1 << 20
_LOOK_SECONDS: Final = 0.02
_WATCH_SECONDS: Final = 1.0
"""The time that a Watch is read before another one begins."""
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Seen:
    """The worst of what was seen during one attack."""

    stall_seconds: float = 0.0
    """The most processor time of the router during another caller's health check."""
    answer_seconds: float = 0.0
    num_answers: int = 0
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first answer that began after the attack."""
    mib: dict[str, float] = field(default_factory=dict)
    """MiB of each process above what it had before."""
    wrong: list[str] = field(default_factory=list)

    def beyond(self, name: str) -> list[str]:
        """The bounds of the attack that were broken."""
        bound = BOUNDS[name]
        problems = [f"{name}: {one}" for one in self.wrong]
        if not self.num_answers:
            problems.append(f"{name}: another caller was not served")
        for what, seen, most in (
            ("a health check took", self.stall_seconds, bound.stall_seconds),
            ("a completion took", self.answer_seconds, bound.answer_seconds),
            *(("MiB of " + process, mib, bound.mib) for process, mib in self.mib.items()),
        ):
            if seen > most:
                problems.append(f"{name}: {what} {seen:.2f}, of {most}")
        return problems


class Watcher:
    """A well-behaved caller, and a look at the processes.

    Args:
        http: a client of the router.
        channel: another one.
        pids: the processes whose memory is looked at, by name.
    """

    def __init__(
        self, http: httpx.AsyncClient, channel: grpc.aio.Channel, pids: Mapping[str, int]
    ) -> None:
        self._http = http
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    async def watch(self, name: str, seconds: float) -> Seen:
        """Watch for so long, and until another caller was served or its time is over."""
        seen, before = Seen(), self._memory()
        tasks = [
            asyncio.create_task(self._check_by_http(seen)),
            asyncio.create_task(self._check_by_grpc(seen)),
            asyncio.create_task(self._watch_health(seen)),
            asyncio.create_task(self._complete(seen)),
            asyncio.create_task(self._weigh(before, seen)),
        ]
        await asyncio.sleep(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BOUNDS[name].answer_seconds):
                await seen.served.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    def _memory(self) -> dict[str, float]:
        return {name: one.memory_info().rss / MIB for name, one in self._processes.items()}

    def _router_seconds(self) -> float:
        """The processor time of the router so far."""
        times = self._processes["router"].cpu_times()
        return float(times.user + times.system)

    async def _weigh(self, before: Mapping[str, float], seen: Seen) -> None:
        while True:
            for name, mib in self._memory().items():
                seen.mib[name] = max(seen.mib.get(name, 0.0), mib - before[name])
            await asyncio.sleep(5 * _LOOK_SECONDS)

    async def _check_by_http(self, seen: Seen) -> None:
        while True:
            with _noting(seen, "health"), self._stall(seen):
                (await self._http.get("/health", timeout=30)).raise_for_status()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _check_by_grpc(self, seen: Seen) -> None:
        asked = health_pb2.HealthCheckRequest()
        while True:
            with _noting(seen, "Check"), self._stall(seen):
                assert (await self._health.Check(asked, timeout=30)).status == _SERVING
            await asyncio.sleep(_LOOK_SECONDS)

    async def _watch_health(self, seen: Seen) -> None:
        """Watch again and again: one that has been told may give way to others."""
        while True:
            with _noting(seen, "Watch"):
                watch = self._health.Watch(health_pb2.HealthCheckRequest())
                with self._stall(seen):
                    told = await asyncio.wait_for(watch.read(), 30)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        while told is not grpc.aio.EOF:
                            assert told.status == _SERVING
                            told = await watch.read()
            watch.cancel()

    @contextlib.contextmanager
    def _stall(self, seen: Seen) -> Iterator[None]:
        """Note for how long the router computes while a call of another caller waits."""
        begun, worked = time.monotonic(), self._router_seconds()
        yield
        # What others on the machine keep the router from is no stall of its own.
        stalled = min(time.monotonic() - begun, self._router_seconds() - worked)
        seen.stall_seconds = max(seen.stall_seconds, stalled)

    async def _complete(self, seen: Seen) -> None:
        while True:
            with _noting(seen, "a completion"):
                await self._ask(seen)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _ask(self, seen: Seen) -> None:
        begun = time.monotonic()
        await self._stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=30)
        params = pb.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
        ask = pb.GenerateRequest(input_ids=pb.TokenIds(ids=[5, 6, 7]), sampling_params=params)
        tokens = 0
        async for response in self._stub.Generate(ask, timeout=30):
            tokens += len(response.delta.token_ids)
        assert tokens == 8, tokens
        seen.num_answers += 1
        seen.served.set()
        seen.answer_seconds = max(seen.answer_seconds, time.monotonic() - begun)


@contextlib.contextmanager
def _noting(seen: Seen, what: str) -> Iterator[None]:
    try:
        yield
    except (grpc.aio.AioRpcError, httpx.HTTPError, AssertionError, TimeoutError) as error:
        seen.wrong.append(f"{what} failed: {error!r:.300}")


@asynccontextmanager
async def watcher(
    address: str, http: str, pids: Mapping[str, int], ca: Path | None = None
) -> AsyncIterator[Watcher]:
    """A watcher of a router with these addresses, over TLS if there is an authority."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        trusted, channel = None, grpc.aio.insecure_channel(address, options)
    else:
        trusted = ssl.create_default_context(cafile=str(ca))
        known = grpc.ssl_channel_credentials(await asyncio.to_thread(ca.read_bytes))
        channel = grpc.aio.secure_channel(address, known, options)
    url = f"http{'' if ca is None else 's'}://{http}"
    async with httpx.AsyncClient(base_url=url, verify=trusted or False) as client, channel:
        yield Watcher(client, channel, pids)


class Attackers:
    """The process of the attackers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @asynccontextmanager
    async def attacking(self, name: str) -> AsyncIterator[None]:
        """A context during which an attack goes on."""
        await self._tell(name)
        yield
        await self._tell("")

    async def _tell(self, name: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n".encode())
        async with asyncio.timeout(30):
            said = (await self._process.stdout.readline()).decode().strip()
        assert said == "ok", said


@asynccontextmanager
async def attackers(address: str, http: str) -> AsyncIterator[Attackers]:
    """Attackers of these addresses, in a process of their own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attack.attackers", address, http),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Attackers(process)
    finally:
        process.kill()
        await process.wait()
