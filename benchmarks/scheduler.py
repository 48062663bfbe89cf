"""What a step costs beside its forward, on the engine's thread and on that of forwards.

python -m benchmarks.scheduler

The engine's thread takes the last step's output, plans and launches the next: `Engine.run_pass`.
The other lays out a batch and samples, here greedily from a small vocabulary:
`StepPipeline.launch`. All of it is the real thing but for the model, which answers at once.
All requests generate (an aggregated worker, whose prompts are computed before
the clock runs), a token a step, 16 tokens a page, with a pool that has room.
With overlap a pass takes the output of step N while step N + 1 computes, and plans N + 2.

A figure is the median (of the engine's thread also the 99th percentile) over the steps that are
timed.
The bar is for the median at 256 requests with overlap, on a machine that does
nothing else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch

from kvrelay.aggregated_worker.scheduler import AggregatedRequest, AggregatedScheduler
from kvrelay.deploy.load_generator.table import table
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.model_executor import ModelExecutor
from kvrelay.engine.executor.pipeline import StepPipeline
from kvrelay.engine.executor.step import Step
from kvrelay.engine.scheduler.commands import Attach, Submit
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.loop import Engine
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.wire.submit import (
    GenerationParams,
    RequestKey,
    SamplingParams,
    StopConditions,
    SubmitRequest,
)
from kvrelay.wire.worker_info import WorkerRole

BAR_MS = 1.0
PROMPT_TOKENS = 64
PAGE_SIZE = 16
VOCAB = 128


@dataclass(frozen=True)
class Figure:
    """One batch size in one mode."""

    requests: int
    overlap: bool
    median_ms: float
    p99_ms: float
    executor_ms: float
    """The median of the forward thread's."""


class InstantModel:
    """Always sure of the same token."""

    def __init__(self) -> None:
        self._logits = torch.zeros(1, VOCAB)
        self._logits[0, 1] = 1

    def launch(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the same token, one row for each that is asked for."""
        return self._logits.expand(len(batch.logit_rows), VOCAB)


class Bench:
    """A worker whose forwards are computed when it is told to."""

    def __init__(self, requests: int, steps: int, *, overlap: bool) -> None:
        tokens = PROMPT_TOKENS + 2 * steps + 64
        config = WorkerConfig(
            "bench",
            WorkerRole.AGGREGATED,
            Path(),
            "counting",
            max_running=requests,
            chunk_tokens=4096,
            overlap=overlap,
        )
        kv_cache = KVCacheManager(
            [PoolShape("full", (requests + 1) * (tokens // PAGE_SIZE + 1))],
            page_size=PAGE_SIZE,
            total_rows=requests,
            max_row_tokens=tokens,
            index=RadixTree(PAGE_SIZE, [None]),
        )
        context: SchedulerContext[AggregatedRequest] = SchedulerContext(
            kv_cache, Outbox(lambda *_: None), WorkerMetrics(config)
        )
        scheduler = AggregatedScheduler(context, None, config)  # type: ignore[arg-type]  # no stop strings
        self._engine = Engine(
            context,
            scheduler,
            self,
            failed_forwards_limit=config.failed_forwards_limit,
            overlap=overlap,
            audit_pages=False,
        )
        self._pipeline: StepPipeline[AggregatedRequest] = StepPipeline(
            ModelExecutor(InstantModel(), lambda _: None)
        )
        self._steps: deque[Step[AggregatedRequest]] = deque()
        self._link = RouterLink("bench")
        rng = np.random.default_rng(0)
        params = GenerationParams(
            SamplingParams(temperature=0), StopConditions(max_tokens=tokens - PROMPT_TOKENS)
        )
        submits = [
            Submit(
                self._link,
                SubmitRequest(
                    RequestKey("bench", str(number), 1),
                    tuple(rng.integers(0, VOCAB, PROMPT_TOKENS).tolist()),
                    PROMPT_TOKENS,
                    params,
                ),
            )
            for number in range(requests)
        ]
        self._engine.run_pass([Attach(self._link), *submits])
        while any(len(step.scheduled) < requests for step in self._steps):
            self.step()

    def launch(self, step: Step[AggregatedRequest]) -> None:
        """Keep a step until it is told to be computed."""
        self._steps.append(step)

    def step(self) -> tuple[float, float]:
        """The seconds of a forward without a model, and of the engine's pass that follows it."""
        step, begun = self._steps.popleft(), time.perf_counter()
        [ended] = self._pipeline.launch(step)
        computed = time.perf_counter()
        self._engine.run_pass([ended])
        return computed - begun, time.perf_counter() - computed


def measure(sizes: list[int], steps: int) -> list[Figure]:
    """Time `steps` steps of every size, with overlap and without."""
    figures = []
    for requests in sizes:
        for overlap in (True, False):
            bench = Bench(requests, steps, overlap=overlap)
            both = [bench.step() for _ in range(steps)][steps // 10 :]
            forwards, passes = ([1e3 * one for one in part] for part in zip(*both, strict=True))
            p99, executor = float(np.percentile(passes, 99)), statistics.median(forwards)
            figures.append(Figure(requests, overlap, statistics.median(passes), p99, executor))
    return figures


@click.command(context_settings={"show_default": True})
@click.option("--sizes", default="1,32,256", help="Running requests, comma-separated.")
@click.option("--steps", type=click.IntRange(min=10), default=500, help="Timed steps of each.")
@click.option("--check", is_flag=True, help="Exit with 1 if the bar is missed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(sizes: str, steps: int, check: bool, as_json: bool) -> None:
    """Print milliseconds a step of the engine's thread and of the forward thread."""
    figures = measure([int(size) for size in sizes.split(",")], steps)
    if as_json:
        click.echo(json.dumps([asdict(figure) for figure in figures]))
    else:
        header = ("running requests", "overlap", "median ms", "p99 ms", "executor ms")
        rows = [
            [
                str(one.requests),
                "on" if one.overlap else "off",
                f"{one.median_ms:.3f}",
                f"{one.p99_ms:.3f}",
                f"{one.executor_ms:.4f}",
            ]
            for one in figures
        ]
        click.echo(table(header, rows))
    barred = [one for one in figures if one.requests == 256 and one.overlap]
    slow = [one for one in barred if one.median_ms > BAR_MS]
    if check and slow:
        raise click.ClickException(f"{slow[0].median_ms:.2f} ms a step; the bar is {BAR_MS}")


if __name__ == "__main__":
    main()
