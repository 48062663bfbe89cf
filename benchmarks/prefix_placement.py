"""Placement by cached prefixes against placement by load alone, on the Mooncake conversation trace.

python -m benchmarks.prefix_placement mooncake_conversation_trace.jsonl.gz

The router's placement and links, the workers' schedulers, memory and prefix indexes are the real
ones; forwards take the time of a virtual clock, and messages take none. Lengths are an eighth of
the trace's: a block of 512 tokens is one of 64, which is one mark. Both placements see the same
requests at the same moments. A forward takes 10 ms and 0.2 ms a token.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.load_generator.trace import BLOCK_TOKENS, TraceRow, read_trace
from tests.engine.simulation.model import VOCAB
from tests.engine.simulation.placed import PlacedClockwork, ttfts

SCALE = 8
PAGE_SIZE = 16
MOST_TOKENS = 16_384
ENTRIES = 1 << 18


@dataclass(frozen=True)
class Figure:
    """One placement at one speed of the trace."""

    placement: str
    speed: float
    prefill_hits: float
    """Share of the prompts' tokens that no prefill worker computed."""
    decode_hits: float
    """Share of the prompts' tokens that no decode worker read."""
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_mean_seconds: float
    busiest_share: float
    """Of the requests, the prefill worker's that got most."""


@dataclass(frozen=True)
class Shape:
    """A cluster."""

    pairs: int = 4
    pages: int = 8192
    rows: int = 64
    chunk_tokens: int = 512


def scaled(row: TraceRow) -> tuple[list[int], int]:
    """A prompt of an eighth of the row's tokens, of which equal blocks have equal ones; and its
    output's length."""
    block_tokens = BLOCK_TOKENS // SCALE
    prompt = [
        int(token)
        for block in row.blocks
        for token in np.random.default_rng(block).integers(0, VOCAB, block_tokens)
    ]
    length = max(1, min(row.input_len // SCALE, len(prompt)))
    return prompt[:length], max(1, row.output_len // SCALE)


def replay(
    rows: Sequence[TraceRow], speed: float, shape: Shape, prefix_entries: int
) -> PlacedClockwork:
    """The simulation, in which all requests have ended."""
    simulation = PlacedClockwork(
        0,
        PAGE_SIZE,
        shape.pages,
        shape.rows,
        shape.chunk_tokens,
        workers=shape.pairs,
        audit_pages=False,
        most_tokens=MOST_TOKENS,
        prefix_entries=prefix_entries,
    )
    for row in rows:
        simulation.run_until((row.at - rows[0].at) / speed)
        prompt, output = scaled(row)
        simulation.submit(prompt, output)
    simulation.run_until(simulation.clock + 3600)
    return simulation


def measure(rows: Sequence[TraceRow], speed: float, shape: Shape, prefix_entries: int) -> Figure:
    """What came of a replay."""
    simulation = replay(rows, speed, shape, prefix_entries)
    tokens = sum(len(request.prompt) for request in simulation.submitted)
    waits = sorted(ttfts(simulation))
    placed = [request.prefill.name for request in simulation.submitted]
    moved = sum(w.kv_cache.cache_counts.hit_tokens for w in simulation.decodes)
    return Figure(
        "prefixes" if prefix_entries else "load alone",
        speed,
        sum(request.cached_tokens for request in simulation.submitted) / tokens,
        moved / tokens,
        statistics.median(waits),
        waits[int(0.9 * len(waits))],
        statistics.mean(waits),
        max(placed.count(worker.name) for worker in simulation.prefills) / len(placed),
    )


def measure_all(
    rows: Sequence[TraceRow], speeds: Sequence[float], shape: Shape
) -> Iterator[Figure]:
    """Both placements at each speed."""
    for speed in speeds:
        for entries in (0, ENTRIES):
            started = time.monotonic()
            figure = measure(rows, speed, shape, entries)
            click.echo(f"{figure} ({time.monotonic() - started:.0f} s)", err=True)
            yield figure


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", default=1000, show_default=True, help="Rows of the trace.")
@click.option("--pairs", default=4, show_default=True, help="Prefill workers, and decode workers.")
@click.option("--pages", default=8192, show_default=True, help="Of 16 tokens, of each worker.")
@click.option(
    "--speed",
    "speeds",
    type=float,
    multiple=True,
    default=(3.0, 5.0),
    show_default=True,
    help="The trace is played so much faster.",
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    trace: Path, requests: int, pairs: int, pages: int, speeds: tuple[float, ...], out: Path | None
) -> None:
    """Hit rates and times to first token of both placements."""
    rows = read_trace(trace, requests)
    figures = list(measure_all(rows, speeds, Shape(pairs, pages)))
    click.echo(
        table(
            ["placement", "speed", "P hits", "D hits", "TTFT p50", "p90", "mean", "busiest P"],
            [
                [
                    one.placement,
                    f"{one.speed:g}",
                    f"{one.prefill_hits:.1%}",
                    f"{one.decode_hits:.1%}",
                    f"{one.ttft_p50_seconds:.2f}",
                    f"{one.ttft_p90_seconds:.2f}",
                    f"{one.ttft_mean_seconds:.2f}",
                    f"{one.busiest_share:.0%}",
                ]
                for one in figures
            ],
        )
    )
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in figures], indent=2))


if __name__ == "__main__":
    main()
