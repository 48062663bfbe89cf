"""Measurements of one running system."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import psutil

from benchmarks.peers import interference
from benchmarks.peers.interference import interfere
from benchmarks.peers.store import Figures
from benchmarks.peers.systems import Serving
from kvrelay.deploy.load_generator.load_client import RunClock
from kvrelay.deploy.load_generator.load_report import LoadReport, Slo, Stats
from kvrelay.deploy.load_generator.measurement import (
    MakeSender,
    Run,
    RunBounds,
    ServerError,
    measure,
    warm_up,
)
from kvrelay.deploy.load_generator.openai_client import (
    Body,
    CompletionsClient,
    Prepare,
    check_status,
    served_model,
)
from kvrelay.deploy.load_generator.workload import Prompts, Workload
from kvrelay.deploy.reach.http_target import IDLE_CONNECTION_SECONDS

DEADLINE_SECONDS = 300.0
MAX_SECONDS = 300.0
"""After that no more requests of a run are sent."""
WARM_UP_REQUESTS = 8
_WARM_UP_TOKENS = 64
"""Of each steady stream."""


@dataclass(frozen=True)
class Driver:
    """The client of one running system."""

    make_client: MakeSender
    vocab_size: int

    async def run(self, workload: Workload, slo: Slo, warm_up: int = WARM_UP_REQUESTS) -> Figures:
        """Warm up, and measure one workload."""
        bounds = RunBounds(MAX_SECONDS, DEADLINE_SECONDS, warm_up)
        run = await measure(self.make_client, self.vocab_size, workload, bounds, slo)
        return figures(run)

    async def interfere(self, number: int, with_prompts: bool) -> Figures:
        """Warm up, and run the steady streams, with or without prompts that arrive."""
        bounds = RunBounds(MAX_SECONDS, DEADLINE_SECONDS, WARM_UP_REQUESTS)
        for short in (interference.streams(number, _WARM_UP_TOKENS), interference.prompts(number)):
            await warm_up(self.make_client, self.vocab_size, short, bounds)
        clock = RunClock()
        steady = interference.streams(number)
        client = self.make_client(Prompts(self.vocab_size, steady.seed), clock)
        arriving = interference.prompts(number) if with_prompts else None
        cpu = time.process_time()
        found = await interfere(steady, arriving, client.send, clock)
        if found.itl_ms is None:
            raise ServerError("the steady streams failed, or did not run at the same time")
        return {
            **_stats("itl", found.itl_ms),
            **_stats("prompts_ttft", found.prompts_ttft_ms),
            "prompts": found.prompts,
            "failed": found.failed,
            "client_cpu_percent": 100 * (time.process_time() - cpu) / clock.now(),
        }


@asynccontextmanager
async def connected(serving: Serving, vocab_size: int) -> AsyncIterator[Driver]:
    """A client of the system; its connections are kept between requests, as many as it needs."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        prefill = serving.prefill_url
        make_client = partial(
            CompletionsClient,
            session,
            serving.base_url,
            await served_model(session, serving.base_url),
            deadline_s=DEADLINE_SECONDS,
            prepare=remote_prefill(session, prefill) if prefill else None,
        )
        yield Driver(make_client, vocab_size)


def vocab_size_of(model: Path) -> int:
    """How many token ids the checkpoint's model knows."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def busy_percent(seconds: float = 0.5) -> float:
    """How busy all cores are, in percent: before a system starts, that is what others do."""
    return float(psutil.cpu_percent(interval=seconds))


def figures(run: Run) -> Figures:
    """What is kept of a run."""
    report: LoadReport = run.report
    return {
        "output_tokens_per_s": report.output_tokens_per_s,
        "requests_per_s": report.requests_per_s,
        **_stats("ttft", report.ttft_ms),
        **_stats("itl", report.itl_ms),
        **_stats("tpot", report.tpot_ms),
        "planned": report.requests.planned,
        "failed": report.requests.failed,
        "failures": report.requests.failures,
        "duration_s": report.duration_s,
        "tokens_per_chunk": report.tokens_per_delta,
        "client_cpu_percent": report.client_cpu_percent,
        "cached_tokens": report.cached_tokens,
        **({"slo_share": report.slo.share} if report.slo else {}),
    }


def _stats(name: str, stats: Stats | None) -> Figures:
    return {
        f"{name}_{column}_ms": getattr(stats, column) if stats else None
        for column in ("p50", "p90", "p99")
    }


def remote_prefill(session: aiohttp.ClientSession, base_url: str) -> Prepare:
    """Return a step that lets vLLM's prefill instance compute the prompt, as vLLM's proxy does.

    The returned fields tell the decode instance where the KV lies.
    """

    async def prepare(body: Body) -> Body:
        asked = {
            **body,
            "max_tokens": 1,
            "stream": False,
            "stream_options": None,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        async with session.post(f"{base_url}/v1/completions", json=asked) as response:
            await check_status(response)
            answer = await response.json()
        return {"kv_transfer_params": answer["kv_transfer_params"]}

    return prepare
