"""`kvrelay bench`: load on a server, over gRPC or HTTP, and a report of what its clients get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.load_report import Slo
from kvrelay.deploy.load_generator.measurement import Results, RunBounds, ServerError, bench_http
from kvrelay.deploy.load_generator.measurement import bench as bench_grpc
from kvrelay.deploy.load_generator.plot import PlotError, require_matplotlib, save_plot
from kvrelay.deploy.load_generator.table import render
from kvrelay.deploy.load_generator.trace import TraceError, read_trace
from kvrelay.deploy.load_generator.workload import (
    ClosedLoop,
    Load,
    Poisson,
    Replay,
    Shape,
    Workload,
    WorkloadError,
    default_requests,
    fixed_workloads,
    trace_jobs,
    trace_workloads,
)
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import FLOATS, INTS, comma_list
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access
from kvrelay.deploy.reach.http_target import TARGET, HttpTarget

DEFAULT_SHAPES = (Shape(256, 128),)
DEFAULT_SLOTS = (8,)
HTTP_VOCAB_SIZE = 1000
"""The number of token ids for prompts over HTTP.

Every tokenizer has as many, and they are enough that no two prompts are alike.
"""
SWEEP_SHAPES = (Shape(256, 128), Shape(1024, 64))
SWEEP_SLOTS = (1, 8, 32)


def choose_loads(
    slots: Sequence[int] | None,
    rates: Sequence[float] | None,
    sweep: bool,
    trace: Path | None,
    time_scale: float | None,
) -> list[Load]:
    """Return the loads that the options ask for; `click.UsageError` if they contradict."""
    if slots and rates:
        raise click.UsageError("--concurrency and --rate exclude each other")
    if time_scale is not None and (trace is None or slots or rates):
        raise click.UsageError("--time-scale needs --trace, and no --concurrency or --rate")
    if rates:
        return [Poisson(rate) for rate in rates]
    if trace is not None and not slots:
        return [Replay(1.0 if time_scale is None else time_scale)]
    return [ClosedLoop(n) for n in slots or (SWEEP_SLOTS if sweep else DEFAULT_SLOTS)]


def _choose_shapes(shapes: Sequence[Shape] | None, sweep: bool) -> Sequence[Shape]:
    return shapes or (SWEEP_SHAPES if sweep else DEFAULT_SHAPES)


def _trace_workloads(
    trace: Path,
    loads: Sequence[Load],
    requests: int | None,
    caps: tuple[int | None, int | None],
    seed: int,
) -> list[Workload]:
    rows = read_trace(trace, requests or max(default_requests(load) for load in loads))
    return trace_workloads(trace.name, trace_jobs(rows, *caps), loads, requests, seed)


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--target",
    type=TARGET,
    default="127.0.0.1:50051",
    help="HOST:PORT of a cluster's gRPC API, or the URL of any server of OpenAI's completions, such"
    " as http://127.0.0.1:8000, that takes prompts of token ids and ignore_eos.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=1),
    show_default="1000",
    help="Prompts over HTTP are of token ids below this; a gRPC server tells its own.",
)
@click.option(
    "--shape",
    "shapes",
    type=comma_list("in/out,...", Shape.parse),
    show_default="256/128",
    help="Prompt and output tokens of every request; several, with commas, give a run each.",
)
@click.option(
    "--concurrency",
    "slots",
    type=INTS,
    show_default="8",
    help="Closed loop of so many clients; several, with commas, give a run each.",
)
@click.option(
    "--rate",
    "rates",
    type=FLOATS,
    help="Poisson arrivals a second, instead of a closed loop; several as above.",
)
@click.option(
    "--sweep",
    is_flag=True,
    help="Defaults of --shape 256/128,1024/64 and --concurrency 1,8,32: every combination.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lengths from an Azure .csv or Mooncake .jsonl (.gz) file instead of --shape; arrivals too"
    " unless --concurrency or --rate is given.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    show_default="1",
    help="Factor on the trace's times: 0.1 replays it ten times as fast.",
)
@click.option("--max-input-len", type=click.IntRange(min=1), help="Cut a trace's longer prompts.")
@click.option("--max-output-len", type=click.IntRange(min=1), help="Cut a trace's longer outputs.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    show_default="4 x concurrency, at least 8; 100 at a rate or by a trace's times",
    help="Requests of each run.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    help="Send no more after this time, in each run.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    help="Seconds after which a request has failed.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    help="Requests before each run that are not measured.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    help="Of prompts and arrivals. Change it where a prefix cache may know the last run's prompts.",
)
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0), help="Bound on time to first token.")
@click.option(
    "--slo-itl-ms",
    type=click.FloatRange(min=0),
    help="Bound on a request's mean inter-token latency, its TPOT.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the figures here; - for standard output, instead of the table.",
)
@click.option("--json-requests", is_flag=True, help="Also write every request's record to --json.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the distributions (.png, .svg, .pdf); needs the extra 'bench'.",
)
@with_clear_errors
@with_access
def bench(
    *,
    debug: bool,
    target: Address | HttpTarget,
    vocab_size: int | None,
    access: CommandAccess,
    shapes: Sequence[Shape] | None,
    slots: Sequence[int] | None,
    rates: Sequence[float] | None,
    sweep: bool,
    trace: Path | None,
    time_scale: float | None,
    max_input_len: int | None,
    max_output_len: int | None,
    requests: int | None,
    max_seconds: float,
    request_timeout: float,
    warmup: int,
    seed: int,
    slo_ttft_ms: float | None,
    slo_itl_ms: float | None,
    json_path: Path | None,
    json_requests: bool,
    plot_path: Path | None,
) -> None:
    """Load a running server and report throughput, latency and SLO attainment.

    Requests are greedy and forced to their output length. Each run ends after
    --max-seconds plus --request-timeout at the latest.
    """
    if vocab_size is not None and not isinstance(target, HttpTarget):
        raise click.UsageError("--vocab-size needs a --target of HTTP")
    if trace is not None and (shapes or sweep):
        raise click.UsageError("--trace excludes --shape and --sweep")
    if trace is None and (max_input_len or max_output_len):
        raise click.UsageError("--max-input-len and --max-output-len need --trace")
    loads = choose_loads(slots, rates, sweep, trace, time_scale)
    try:
        if plot_path is not None:
            require_matplotlib()
        if trace is None:
            workloads = fixed_workloads(_choose_shapes(shapes, sweep), loads, requests, seed)
        else:
            caps = (max_input_len, max_output_len)
            workloads = _trace_workloads(trace, loads, requests, caps, seed)
        bounds = RunBounds(max_seconds, request_timeout, warmup)
        slo = Slo(slo_ttft_ms, slo_itl_ms)
        if isinstance(target, HttpTarget):
            target.check(access)
            ids = vocab_size or HTTP_VOCAB_SIZE
            results = asyncio.run(bench_http(target, ids, workloads, bounds, slo, access))
        else:
            access.check(target)
            results = asyncio.run(bench_grpc(str(target), workloads, bounds, slo, access))
        _publish(results, json_path, json_requests, plot_path)
    except (ServerError, WorkloadError, TraceError, PlotError) as error:
        raise DeployError(str(error)) from error
    if not any(run.report.requests.completed for run in results.runs):
        raise DeployError("no request completed")


def _publish(
    results: Results, json_path: Path | None, json_requests: bool, plot_path: Path | None
) -> None:
    document = json.dumps(results.to_json(json_requests), indent=2, allow_nan=False)
    if json_path == Path("-"):
        click.echo(document)
    else:
        click.echo(render([run.report for run in results.runs]))
        if json_path is not None:
            json_path.write_text(document + "\n", encoding="utf-8")
    if plot_path is not None:
        save_plot(plot_path, [(run.report, run.records) for run in results.runs])
