"""What prompts that arrive do to streams that are being decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.loads import Lengths
from kvrelay.deploy.load_generator.load_client import RequestRecord, RunClock
from kvrelay.deploy.load_generator.load_report import Stats, itl, ttft
from kvrelay.deploy.load_generator.measurement import Send, closed_loop
from kvrelay.deploy.load_generator.workload import ClosedLoop, Poisson, Workload

STREAMS = 8
STREAM_LENGTHS = "64/512"
PROMPT_LENGTHS = "1024/16"
PROMPTS_PER_SECOND = 0.5
_MOST_PROMPTS = 1000
"""More than can arrive while the streams run."""


@dataclass(frozen=True)
class Interference:
    """The inter-token latencies of the steady streams, and what the prompts saw."""

    itl_ms: Stats | None
    prompts: int
    prompts_ttft_ms: Stats | None
    failed: int


def streams(number: int, output_len: int | None = None) -> Workload:
    """The eight streams; another ``number`` gives other prompts."""
    made = Lengths(STREAM_LENGTHS).workload(ClosedLoop(STREAMS), STREAMS, number)
    if output_len is None:
        return made
    return replace(made, jobs=tuple(replace(job, output_len=output_len) for job in made.jobs))


def prompts(number: int) -> Workload:
    """The long prompts and when they arrive; their indices are beyond those of the streams."""
    made = Lengths(PROMPT_LENGTHS).workload(Poisson(PROMPTS_PER_SECOND), _MOST_PROMPTS, number)
    jobs = (replace(job, index=job.index + STREAMS) for job in made.jobs)
    return replace(made, jobs=tuple(jobs))


async def interfere(
    steady: Workload, arriving: Workload | None, send: Send, clock: RunClock
) -> Interference:
    """Run the streams to their ends, and let prompts arrive for as long."""
    others = asyncio.create_task(_arrive(arriving, send, clock)) if arriving else None
    records = await closed_loop(steady.jobs, send, STREAMS, clock, max_seconds=float("inf"))
    if others is None:
        return summary(records, [])
    others.cancel()
    return summary(records, await others)


async def _arrive(arriving: Workload, send: Send, clock: RunClock) -> list[RequestRecord]:
    """Send each prompt when it is due until cancelled; then wait for those that were sent."""
    tasks: list[asyncio.Task[RequestRecord]] = []
    origin = clock.now()
    try:
        for job in arriving.jobs:
            await asyncio.sleep(origin + (job.due or 0.0) - clock.now())
            tasks.append(asyncio.ensure_future(send(job)))
    except asyncio.CancelledError:
        pass
    return await asyncio.gather(*tasks)


def summary(steady: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> Interference:
    """The gaps of the streams while all of them had begun and none had ended."""
    done = [record for record in steady if record.completed]
    met = [record for record in others if record.completed]
    begin = max((record.token_times[0] for record in done), default=0.0)
    end = min((record.token_times[-1] for record in done), default=0.0)
    gaps = (
        gap
        for record in done
        for at, gap in zip(record.token_times[1:], itl(record), strict=True)
        if begin < at <= end
    )
    return Interference(
        itl_ms=Stats.of(gaps),
        prompts=len(others),
        prompts_ttft_ms=Stats.of(ttft(record) for record in met),
        failed=len(steady) + len(others) - len(done) - len(met),
    )
