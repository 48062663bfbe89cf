"""Compare kvrelay with vLLM on this machine, and with SGLang on a GPU.

python -m benchmarks.peers --help
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import torch

from benchmarks.peers.goodput import (
    ATTAINED_SHARE,
    HIGHEST_RATE,
    LOWEST_RATE,
    highest_rate,
    limits,
)
from benchmarks.peers.loads import LoadNameError, NamedLoad, parse_lengths
from benchmarks.peers.measure import Driver, busy_percent, connected, vocab_size_of
from benchmarks.peers.page import write_page
from benchmarks.peers.store import Figures, Key, Kind, Store
from benchmarks.peers.systems import SYSTEMS, Servers, Setup, StartError
from benchmarks.with_cluster import interrupt_on_signals
from kvrelay.cpu_kernels.processor import describe_processor
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.load_report import Slo
from kvrelay.deploy.load_generator.measurement import ServerError
from kvrelay.deploy.load_generator.plot import PlotError
from kvrelay.deploy.load_generator.trace import TraceError
from kvrelay.deploy.load_generator.workload import Poisson
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.option_types import comma_list
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL

_LOGS: Final = Path("build/bench-peers")
"""The folder of the systems' logs."""

PARTS = ("throughput", "goodput", "interference", "page")
"""The last one measures nothing and writes the page anew."""
LOADS = ("256/128@8", "256/128@32", "1024/64@8", "1024/64@32", "256/128@1")
GOODPUT_LENGTHS = ("256/128", "1024/64")
CPU_SYSTEMS = tuple(name for name in SYSTEMS if name != "sglang")
GOODPUT_SYSTEMS = ("adaptive", "aggregated", "vllm")
CALM, WITH_PROMPTS = "calm", "prompts"


class OutOfTimeError(Exception):
    """The time that was given is over; what was measured is kept."""


def _system(text: str) -> str:
    if text not in SYSTEMS:
        raise ValueError(f"{text!r} is none of {', '.join(SYSTEMS)}")
    return text


def _part(text: str) -> str:
    if text not in PARTS:
        raise ValueError(f"{text!r} is none of {', '.join(PARTS)}")
    return text


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how much of it."""

    systems: tuple[str, ...]
    rounds: int
    requests_per_client: int
    goodput_requests: int
    limit_factor: float
    first_rate: float
    precision: float
    trace: Path | None
    minutes: float | None


Step = Callable[[Driver], Awaitable[None]]


class Comparison:
    """Fills the store with what the plan asks for and the store does not have yet."""

    def __init__(self, plan: Plan, setup: Setup, store: Store, servers: Servers) -> None:
        self._plan = plan
        self._vocab_size = vocab_size_of(setup.model)
        self._servers = servers
        self._store = store
        self._began = time.monotonic()

    def throughput(self, loads: Sequence[NamedLoad]) -> None:
        """Every system under every load, one system after the other, round by round."""
        for number in range(self._plan.rounds):
            for system in self._plan.systems:
                keys = [Key(Kind.LOAD, system, load.name, number) for load in loads]
                wanted = [
                    self._load_step(load, key)
                    for load, key in zip(loads, keys, strict=True)
                    if self._store.find(key) is None
                ]
                self._run(system, wanted)

    def _load_step(self, load: NamedLoad, key: Key) -> Step:
        async def step(driver: Driver) -> None:
            workload = load.workload(self._plan.requests_per_client, key.round)
            self._keep(key, await driver.run(workload, Slo()))

        return step

    def goodput(self, lengths: Sequence[str]) -> None:
        """Every system's highest rate, within limits that come from all systems' idle figures."""
        idle = [NamedLoad.parse(f"{name}@1", self._plan.trace) for name in lengths]
        self.throughput(idle)
        for number in range(self._plan.rounds):
            for system in self._plan.systems:
                steps = [
                    self._goodput_step(system, load, number)
                    for load in idle
                    if self._searching(system, load, number)
                ]
                self._run(system, steps)

    def _searching(self, system: str, load: NamedLoad, number: int) -> bool:
        """Whether the search needs a probe that is not in the store."""

        async def known(rate: float) -> bool:
            figures = self._store.find(self._probe_key(system, load, number, rate))
            if figures is None:
                raise LookupError(rate)
            return bool(figures["slo_share"] >= ATTAINED_SHARE)

        try:
            asyncio.run(highest_rate(known, self._plan.first_rate, self._plan.precision))
        except LookupError:
            return True
        return False

    def _goodput_step(self, system: str, load: NamedLoad, number: int) -> Step:
        slo = self._limits(load, number)

        async def step(driver: Driver) -> None:
            async def attains(rate: float) -> bool:
                key = self._probe_key(system, load, number, rate)
                figures = self._store.find(key)
                if figures is None:
                    self._check_time()
                    count = self._plan.goodput_requests
                    workload = load.lengths.workload(Poisson(rate), count, number)
                    figures = {
                        **await driver.run(workload, slo),
                        "limit_ttft_ms": slo.ttft_ms,
                        "limit_itl_ms": slo.itl_ms,
                    }
                    self._keep(key, figures)
                return bool(figures["slo_share"] >= ATTAINED_SHARE)

            rate = await highest_rate(attains, self._plan.first_rate, self._plan.precision)
            click.echo(f"{system}, {load.lengths.name}: goodput {rate:g} req/s")

        return step

    def _limits(self, load: NamedLoad, number: int) -> Slo:
        keys = [Key(Kind.LOAD, system, load.name, number) for system in self._plan.systems]
        idle = (figures for key in keys if (figures := self._store.find(key)))
        return limits(idle, self._plan.limit_factor)

    def _probe_key(self, system: str, load: NamedLoad, number: int, rate: float) -> Key:
        name = load.lengths.name
        return Key(Kind.PROBE, system, name, number, rate, self._plan.limit_factor)

    def interference(self) -> None:
        """Steady streams, alone and while prompts arrive."""
        for number in range(self._plan.rounds):
            for system in self._plan.systems:
                keys = [
                    Key(Kind.INTERFERENCE, system, load, number) for load in (CALM, WITH_PROMPTS)
                ]
                wanted = [
                    self._interference_step(key) for key in keys if self._store.find(key) is None
                ]
                self._run(system, wanted)

    def _interference_step(self, key: Key) -> Step:
        async def step(driver: Driver) -> None:
            self._keep(key, await driver.interfere(key.round, key.load == WITH_PROMPTS))

        return step

    def _run(self, system: str, steps: Sequence[Step]) -> None:
        """Start the system and take the steps; nothing if there are none."""
        if not steps:
            return
        self._check_time()
        self._busy = busy_percent()
        click.echo(f"{system}'s turn")
        with self._servers.turn(SYSTEMS[system]) as serving:

            async def take() -> None:
                async with connected(serving, self._vocab_size) as driver:
                    for step in steps:
                        self._check_time()
                        await step(driver)

            asyncio.run(take())

    def _keep(self, key: Key, figures: Figures) -> None:
        figures |= {
            "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "others_cpu_percent": self._busy,
        }
        self._store.add(key, figures)
        click.echo(_line(key, figures))

    def _check_time(self) -> None:
        minutes = self._plan.minutes
        if minutes is not None and time.monotonic() - self._began > 60 * minutes:
            raise OutOfTimeError


def _line(key: Key, figures: Figures) -> str:
    shown = ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "slo_share")
    values = [f"{name} {figures[name]:.4g}" for name in shown if figures.get(name) is not None]
    rate = "" if key.rate is None else f" {key.rate:g} req/s"
    failed = f", {figures['failed']} FAILED {figures.get('failures', '')}"
    return (
        f"round {key.round + 1} {key.system} {key.load}{rate}: {', '.join(values)}"
        f"{failed if figures['failed'] else ''};"
        f" client {figures['client_cpu_percent']:.1f}% of a core"
    )


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--only",
    "parts",
    type=comma_list("part,...", _part),
    default="throughput",
    help=f"Of {', '.join(PARTS)}; page measures nothing.",
)
@click.option(
    "--systems",
    type=comma_list("system,...", _system),
    show_default="all but sglang; for goodput and interference " + ",".join(GOODPUT_SYSTEMS),
    help=f"In this order, in every round: {', '.join(SYSTEMS)}.",
)
@click.option(
    "--loads",
    type=comma_list("load,...", str),
    default=",".join(LOADS),
    help="PROMPT/OUTPUT@CLIENTS or azure@CLIENTS.",
)
@click.option(
    "--lengths",
    type=comma_list("lengths,...", str),
    default=",".join(GOODPUT_LENGTHS),
    help="Of the requests for goodput: PROMPT/OUTPUT or azure.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3)
@click.option(
    "--requests-per-client",
    type=click.IntRange(min=1),
    default=4,
    help="Of each closed loop; 8 requests at least.",
)
@click.option(
    "--goodput-requests", type=click.IntRange(min=10), default=50, help="Of each rate tried."
)
@click.option(
    "--limit-factor",
    type=click.FloatRange(min=1),
    default=2.0,
    help="A request's limits for goodput, over the better engine's medians with one client.",
)
@click.option(
    "--first-rate",
    type=click.FloatRange(LOWEST_RATE, HIGHEST_RATE),
    default=1.0,
    help="Requests a second that the search for goodput tries first.",
)
@click.option(
    "--precision",
    type=click.FloatRange(0.01, 1),
    default=0.1,
    help="A rate higher by this share does not attain.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Azure's conversation trace, for loads of the name azure.",
)
@click.option("--quick", is_flag=True, help="One round with half the requests, for development.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Begin nothing new after so long; the same command goes on where it stopped.",
)
@click.option(
    "--runs",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("docs/bench-peers.jsonl"),
    help="What was measured, of all processors.",
)
@click.option("--fresh", is_flag=True, help="Forget what --runs has of this processor.")
@click.option(
    "--page",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs"),
    help="The folder for bench-peers.md and .svg.",
)
@click.option(
    "--vllm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(".venv-peers"),
    help="The environment with vLLM.",
)
@click.option(
    "--sglang",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".venv-sglang"),
    help="The environment with SGLang.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of all systems.")
def main(
    parts: Sequence[str],
    systems: Sequence[str] | None,
    loads: Sequence[str],
    lengths: Sequence[str],
    rounds: int,
    requests_per_client: int,
    goodput_requests: int,
    limit_factor: float,
    first_rate: float,
    precision: float,
    trace: Path | None,
    quick: bool,
    minutes: float | None,
    runs: Path,
    fresh: bool,
    page: Path,
    vllm: Path,
    sglang: Path,
    device: str,
) -> None:
    """Measure kvrelay and other engines in turn, and write the ratios to docs/bench-peers.md."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    store = Store(runs, gpu or describe_processor())
    if fresh:
        store.clear()
    try:
        named = [NamedLoad.parse(load, trace) for load in loads]
        for name in lengths:
            parse_lengths(name, trace)
        path = resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), click.echo).path
        setup = Setup(path, vllm.absolute(), _LOGS, device, sglang.absolute())
        with Servers(setup) as servers:
            for part in parts:
                chosen = systems or (CPU_SYSTEMS if part == "throughput" else GOODPUT_SYSTEMS)
                plan = Plan(
                    tuple(chosen),
                    1 if quick else rounds,
                    2 if quick else requests_per_client,
                    goodput_requests,
                    limit_factor,
                    first_rate,
                    precision,
                    trace,
                    minutes,
                )
                comparison = Comparison(plan, setup, store, servers)
                if part == "throughput":
                    comparison.throughput(named)
                elif part == "goodput":
                    comparison.goodput(lengths)
                elif part == "interference":
                    comparison.interference()
    except OutOfTimeError:
        click.echo("out of time: the same command goes on from here")
    except (DeployError, StartError, ServerError, LoadNameError, TraceError) as error:
        raise click.ClickException(str(error)) from error
    try:
        write_page(store, page)
    except PlotError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    interrupt_on_signals()
    main()
