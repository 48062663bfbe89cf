"""A prefill and a decode worker on one GPU under Ray, under load; then an aggregated worker.

KV goes over NIXL. 1P1D shares one GPU between two processes: its ITL is no measure of two GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.gpu_kit.stages import shapes
from benchmarks.gpu_kit.stages.bench import Bench, stage_options
from benchmarks.with_cluster import interrupt_on_signals, started
from kvrelay.deploy.commands.bench import bench as load_command

LAYOUTS = {"1P1D": ("--prefill", "1", "--decode", "1"), "aggregated": ("--aggregated", "1")}
ANYWHERE = "127.0.0.1:0"


@click.command()
@stage_options
@click.argument("model", type=click.Choice(list(shapes.SHAPES)))
@click.option("--kv-memory", default="12GiB")
@click.option("--shape", default="512/128", help="Tokens of prompts and outputs.")
@click.option("--clients", default="1,32,128")
@click.option("--seconds", default=10, help="Of each load.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def main(
    bench: Bench,
    model: str,
    kv_memory: str,
    shape: str,
    clients: str,
    seconds: int,
    serve_options: tuple[str, ...],
) -> None:
    """Put load on each layout; `serve_options`, behind --, go to `kvrelay serve`."""
    interrupt_on_signals()
    folder = shapes.make(model, bench.models / model, bench.device)
    common = [
        *("--model", str(folder), "--device", bench.device.type, "--kv-memory", kv_memory),
        *("--grpc", ANYWHERE, "--http", ANYWHERE, "--admin", ANYWHERE, "--metrics", ANYWHERE),
        *serve_options,
    ]
    load = ("--shape", shape, "--concurrency", clients, "--max-seconds", str(seconds))
    for layout, workers in LAYOUTS.items():
        with started([*common, *workers]) as cluster, TemporaryDirectory() as temporary:
            told = Path(temporary) / "load.json"
            load_command(
                [*load, "--target", cluster.target, "--json", str(told)], standalone_mode=False
            )
            runs = json.loads(told.read_text())["runs"]
        for run in runs:
            report(bench, layout, run)


def report(bench: Bench, layout: str, run: dict[str, Any]) -> None:
    """Tell the figures of one load."""
    ttft, itl = run["ttft_ms"], run["itl_ms"]
    bench.figure(
        f"{layout} {run['workload']} {run['load']}: {run['output_tokens_per_s']:.0f} tok/s, "
        f"TTFT p50 {ttft['p50']:.0f} ms, ITL p50 {itl['p50']:.1f} ms p99 {itl['p99']:.1f} ms; "
        f"failed {run['requests']['failed']}",
        layout=layout,
        tok_s=run["output_tokens_per_s"],
        ttft_p50=ttft["p50"],
        itl_p50=itl["p50"],
    )


if __name__ == "__main__":
    main()
