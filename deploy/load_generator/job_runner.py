"""The sending of a workload's jobs by a client, in a closed loop or at their due times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvrelay.deploy.load_generator.load_client import RequestRecord, RunClock
from kvrelay.deploy.load_generator.workload import ClosedLoop, Job, Workload

Send = Callable[[Job], Awaitable[RequestRecord]]


async def drive(
    workload: Workload, send: Send, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Send the workload's jobs, and wait for all that were sent.

    After ``max_seconds`` no more are sent. Those that run then are waited for:
    to drop them would drop the slowest and flatter the server.
    """
    if isinstance(workload.load, ClosedLoop):
        slots = workload.load.concurrency
        return await closed_loop(workload.jobs, send, slots, clock, max_seconds)
    return await open_loop(workload.jobs, send, clock, max_seconds)


async def closed_loop(
    jobs: Sequence[Job], send: Send, concurrency: int, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests running until the jobs or the time run out."""
    records: list[RequestRecord] = []
    waiting = iter(jobs)

    async def slot() -> None:
        while clock.now() < max_seconds and (job := next(waiting, None)) is not None:
            records.append(await send(job))

    async with asyncio.TaskGroup() as slots:
        for _ in range(min(concurrency, len(jobs))):
            slots.create_task(slot())
    return records


async def open_loop(
    jobs: Sequence[Job], send: Send, clock: RunClock, max_seconds: float
) -> list[RequestRecord]:
    """Send each job at its due time, even if earlier ones still run."""
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def run(job: Job) -> RequestRecord:
        return await send(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due = job.due or 0.0
            if max(due, clock.now()) >= max_seconds:
                break
            await asyncio.sleep(due - clock.now())
            tasks.append(group.create_task(run(job)))
    return [task.result() for task in tasks]
