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

import cProfile
import json
import pstats
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.router_scale.bench import measure
from benchmarks.router_scale.load import Figure, Load
from kvrelay.deploy.load_generator.table import table


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
