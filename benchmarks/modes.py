"""What overlap and speculation gain: one worker, one model, each mode against the plain one.

python -m benchmarks.modes

An aggregated worker's own engine, forward thread and model, in this process,
without Ray, gRPC or a router. All requests come at once, greedy, and generate
as many tokens each; the modes take turns, repetition by repetition, so that
all see the same machine. The figures are medians over the repetitions:

- tok/s: output tokens in the seconds from the submission to the last token.
- ratio: to the plain mode, without overlap and drafts, on the same prompts.
- idle µs: time a step that the forward thread had nothing to do, because the
  next step was not planned yet: what overlap is there to hide.
- tokens a forward and request, and the part of drafted tokens that were kept.

The repetitive prompts are lists that ask to be continued; the plain ones are prose.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Never

import click
from tokenizers import Tokenizer

from kvrelay.aggregated_worker.scheduler import AggregatedRequest, AggregatedScheduler
from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.engine.config import PrefixIndexKind, Speculation, WorkerConfig
from kvrelay.engine.executor.forward_thread import ForwardThread
from kvrelay.engine.scheduler.commands import Attach, Inbox, Submit
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.loop import Engine, EngineMessage, EngineThread
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.worker.loading import load_model
from kvrelay.engine.worker.memory import make_kv_cache
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.wire.output import EngineOutputs, RequestOutput
from kvrelay.wire.submit import (
    GenerationParams,
    RequestKey,
    SamplingParams,
    StopConditions,
    SubmitRequest,
)
from kvrelay.wire.worker_info import WorkerRole

_PROSE = (
    "The harbour was quiet that morning, and the old captain sat on the wall and",
    "In the year that the river froze, the people of the valley decided that they",
    "A good engineer reads the whole report before she forms an opinion, because",
    "Nobody had seen the painting for thirty years when the museum finally opened",
)
_LISTS = (
    "item 1: red, item 2: red, item 3: red, item 4: red, item 5: red, item 6: red,",
    "def f(a): return a\ndef g(a): return a\ndef h(a): return a\ndef i(a): return a\ndef",
    "Monday open. Tuesday open. Wednesday open. Thursday open. Friday open. Monday open.",
    "<li>one</li>\n<li>one</li>\n<li>one</li>\n<li>one</li>\n<li>one</li>\n<li>one</li>\n",
)


@dataclass(frozen=True)
class Mode:
    """How the steps are made."""

    name: str
    overlap: bool
    speculation: Speculation


MODES = (
    Mode("plain", False, Speculation.NONE),
    Mode("overlap", True, Speculation.NONE),
    Mode("n-gram drafts", False, Speculation.NGRAM),
    Mode("overlap, n-gram drafts", True, Speculation.NGRAM),
)


@dataclass(frozen=True)
class Run:
    """One mode's way through one set of prompts."""

    tokens_per_s: float
    idle_us: float
    tokens_per_forward: float
    kept: float


class Bench:
    """A worker's engine that tells when its requests have ended."""

    def __init__(self, config: WorkerConfig, tokenizer: Tokenizer) -> None:
        model = load_model(config)
        kv_cache = make_kv_cache(config, model.pools, model.runner.max_model_len)
        self._inbox: Inbox[EngineMessage[AggregatedRequest, Never]] = Inbox()
        self._tokenizer, self._metrics = tokenizer, WorkerMetrics(config)
        self._labels = {"role": "aggregated", "worker": config.name, "model": config.model_name}
        context: SchedulerContext[AggregatedRequest] = SchedulerContext(
            kv_cache, Outbox(self._deliver), self._metrics
        )
        scheduler = AggregatedScheduler(context, tokenizer, config)
        self._forward = ForwardThread(model.executor, self._inbox.post, _give_up)
        engine = Engine(
            context,
            scheduler,
            self._forward,
            failed_forwards_limit=config.failed_forwards_limit,
            overlap=config.overlap,
            audit_pages=False,
        )
        self._thread = EngineThread(engine, self._inbox, _give_up)
        self._link = RouterLink("bench")
        self._ended: Inbox[RequestOutput] = Inbox()
        self._number = 0
        self._thread.start()
        self._inbox.post(Attach(self._link))

    def run(self, prompts: list[str], tokens: int) -> Run:
        """Serve `prompts` at once."""
        before = self._totals()
        begun = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            ids = tuple(self._tokenizer.encode(prompt).ids)
            key = RequestKey("bench", str(self._number), 1)
            greedy, stops = SamplingParams(temperature=0), StopConditions(max_tokens=tokens)
            submission = SubmitRequest(key, ids, len(ids), GenerationParams(greedy, stops))
            self._inbox.post(Submit(self._link, submission))
        left = len(prompts)
        while left:
            left -= len(self._ended.take_all())
        seconds = time.perf_counter() - begun
        steps, busy, drafted, kept = (
            after - earlier for after, earlier in zip(self._totals(), before, strict=True)
        )
        made = len(prompts) * tokens
        return Run(
            tokens_per_s=made / seconds,
            idle_us=1e6 * (seconds - busy) / steps,
            tokens_per_forward=made / len(prompts) / steps,
            kept=kept / drafted if drafted else 0.0,
        )

    def close(self) -> None:
        """End both threads."""
        self._thread.close()
        self._forward.close()

    def _deliver(self, call: object, batch: list[tuple[object, EngineOutputs]]) -> None:
        for _, step in batch:
            for output in step.outputs:
                if output.end is not None:
                    self._ended.post(output)

    def _totals(self) -> list[float]:
        names = ("step_seconds_count", "step_seconds_sum", "draft_tokens_total")
        registry = self._metrics.registry
        return [
            registry.get_sample_value(f"kvrelay_{name}", self._labels) or 0.0
            for name in (*names, "accepted_draft_tokens_total")
        ]


def _give_up(reason: str) -> None:
    raise SystemExit(reason)


def measure(model: Path, requests: int, tokens: int, repetitions: int) -> list[list[str]]:
    """A row for each set of prompts and mode."""
    base = WorkerConfig(
        "bench",
        WorkerRole.AGGREGATED,
        model,
        "bench",
        prefix_index=PrefixIndexKind.NONE,
        max_running=requests,
    )
    tokenizer = load_tokenizer(model).tokenizer
    benches = {
        mode: Bench(replace(base, overlap=mode.overlap, speculation=mode.speculation), tokenizer)
        for mode in MODES
    }
    sets = {"prose": _PROSE, "lists": _LISTS}
    runs: dict[tuple[str, Mode], list[Run]] = defaultdict(list)
    for repetition in range(1 + repetitions):
        for name, prompts in sets.items():
            for mode, bench in benches.items():
                asked = [prompts[i % len(prompts)] for i in range(requests)]
                run = bench.run(asked, tokens)
                if repetition:
                    runs[name, mode].append(run)
    for bench in benches.values():
        bench.close()
    rows = []
    for (name, mode), some in runs.items():
        plain = [run.tokens_per_s for run in runs[name, MODES[0]]]
        speed = statistics.median(run.tokens_per_s for run in some)
        rows.append(
            [
                name,
                mode.name,
                f"{speed:.1f}",
                f"{speed / statistics.median(plain):.2f}",
                f"{statistics.median(run.idle_us for run in some):.0f}",
                f"{statistics.median(run.tokens_per_forward for run in some):.2f}",
                f"{statistics.median(run.kept for run in some):.2f}",
            ]
        )
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--model", help="A checkpoint; as `kvrelay serve --model`.", default=DEFAULT_MODEL)
@click.option("--requests", type=click.IntRange(min=1), default=4, help="At once.")
@click.option("--tokens", type=click.IntRange(min=2), default=64, help="Generated by each.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, help="Of everything.")
def main(model: str, requests: int, tokens: int, repetitions: int) -> None:
    """Print what overlap and speculation gain."""
    path = resolve_model(model, "bfloat16", users_models(), lambda _: None).path
    header = ("prompts", "mode", "tok/s", "ratio", "idle µs", "tokens/forward", "drafts kept")
    click.echo(table(header, measure(path, requests, tokens, repetitions)))


if __name__ == "__main__":
    main()
