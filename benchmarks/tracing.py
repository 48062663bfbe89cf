"""What tracing costs a whole cluster, in CPU time a generated token.

python -m benchmarks.tracing [options of kvrelay serve] -- [own options]

A cluster is started with the given options, with ``--otlp``, and with a collector that takes all
spans. It gets the same requests in each round, as one of these loads in turn:

- untraced: the client's traceparent says that its requests are not traced;
- sampled: the client says nothing, and the cluster traces its share of them;
- all: the client's traceparent says that all are traced;
- off: they go to a second cluster, without ``--otlp``. Two clusters with the same options differ by
  some percent, so this shows large differences alone.

A round's figure is the CPU time of router and workers, by the kernel's count, over the tokens;
Ray's own processes, the collector and the client are not in it. Give a small model: a larger one
hides what tracing costs. One request at a time, and one placement for all, make rounds alike: what
a token costs depends on the batch that it is computed in far more than on tracing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import click
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.idle_cpu import cluster_pids
from benchmarks.threads import cpu_seconds
from benchmarks.with_cluster import Started, interrupt_on_signals, split, started
from kvrelay.client.access import Metadata
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.load_client import LoadClient, RunClock
from kvrelay.deploy.load_generator.measurement import closed_loop
from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.load_generator.workload import Prompts, Shape, fixed_jobs
from kvrelay.observe.trace_context import HEADER, TraceContext, new_span_id, new_trace_id
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

_REQUEST_SECONDS = 120.0
_SEND_SECONDS = 1.2
"""After which the spans of a round have been sent: exporters send once a second."""
OFF, UNTRACED, SAMPLED, ALL = "off", "untraced", "sampled", "all"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Counts spans."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Takes all of them."""
        self.spans += sum(len(s.spans) for one in request.resource_spans for s in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def run_collector(parent: Connection) -> None:
    """Takes spans until the process is ended; tells its port, then how many when asked."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    parent.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    while True:
        parent.recv()
        parent.send(collector.spans)


@dataclass(frozen=True)
class Load:
    """Of each round."""

    shape: Shape
    requests: int
    concurrency: int

    @property
    def tokens(self) -> int:
        """That are generated."""
        return self.requests * self.shape.output_len


async def send(target: str, load: Load, metadata: Metadata) -> None:
    """Send the requests, and read their outputs. Raises `ClickException` if one fails."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = rpc.InferenceServiceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        clock = RunClock()
        prompts = Prompts(info.vocab_size, [time.time_ns()])
        client = LoadClient(stub, prompts, clock, _REQUEST_SECONDS, metadata)
        jobs = fixed_jobs(load.shape, load.requests)
        records = await closed_loop(jobs, client.send, load.concurrency, clock, _REQUEST_SECONDS)
    for record in records:
        if not record.completed:
            raise click.ClickException(f"a request failed: {record.status}: {record.detail}")


def cpu_us_a_token(cluster: Started, load: Load, metadata: Metadata = ()) -> float:
    """Of one round."""
    pids = cluster_pids(cluster.pid)
    before = cpu_seconds(pids)
    asyncio.run(send(cluster.target, load, metadata))
    time.sleep(_SEND_SECONDS)
    after = cpu_seconds(pids)
    # A thread that has ended since had hardly run.
    used = sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
    return 1e6 * used / load.tokens


def saying(*, sampled: bool) -> Metadata:
    """What a caller sends whose spans are recorded, or are not."""
    return ((HEADER, str(TraceContext(new_trace_id(), new_span_id(), sampled))),)


def compare(
    off: Started | None, on: Started, load: Load, names: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """The figures of each kind of load, by round; each begins as often as the others."""
    figures: dict[str, list[float]] = {name: [] for name in names}
    loads: dict[str, tuple[Started, Metadata]] = {
        OFF: (off or on, ()),
        UNTRACED: (on, saying(sampled=False)),
        SAMPLED: (on, ()),
        ALL: (on, saying(sampled=True)),
    }
    for cluster, _ in (loads[OFF], loads[ALL]):
        # The first requests cost more, and the first spans load what sends them.
        cpu_us_a_token(cluster, load, saying(sampled=True))
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            cluster, metadata = loads[name]
            figures[name].append(cpu_us_a_token(cluster, load, metadata))
            click.echo(f"{name}: {figures[name][-1]:.1f} µs a token", err=True)
    return figures


def _print(figures: dict[str, list[float]], load: Load, spans: int) -> None:
    first = next(iter(figures.values()))
    rows = []
    for name, found in figures.items():
        ratios = sorted(one / base for one, base in zip(found, first, strict=True))
        quarter = len(ratios) // 4
        mean = statistics.mean(found) / statistics.mean(first)
        row = [name, f"{statistics.median(found):.1f}", f"{mean:.4f}"]
        row.append(f"{statistics.median(ratios):.4f}")
        rows.append([*row, f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"])
    click.echo(table(("load", "µs a token", "of the first, means", "median", "quartiles"), rows))
    tokens = load.tokens * len(first)
    click.echo(f"{tokens} tokens of each; the collector got {spans} spans")


@click.command(context_settings={"show_default": True})
@click.option("--input-tokens", default=64)
@click.option("--output-tokens", default=16)
@click.option("--requests", default=50, help="Of each round.")
@click.option("--concurrency", default=1, help="Requests at a time.")
@click.option("--rounds", type=click.IntRange(min=1), default=16, help="Of each load.")
@click.option(
    "--load",
    "names",
    type=click.Choice([OFF, UNTRACED, SAMPLED, ALL]),
    multiple=True,
    default=[UNTRACED, SAMPLED, ALL],
    help="Which are compared, with the first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def main(
    serve_options: Sequence[str],
    input_tokens: int,
    output_tokens: int,
    requests: int,
    concurrency: int,
    rounds: int,
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print what tracing costs a token."""
    interrupt_on_signals()
    load = Load(Shape(input_tokens, output_tokens), requests, concurrency)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    collector = context.Process(target=run_collector, args=(theirs,), daemon=True)
    collector.start()
    with_spans = ["--otlp", f"http://127.0.0.1:{ours.recv()}"]
    try:
        with contextlib.ExitStack() as running:
            begin = functools.partial(started, echo_to=sys.stderr)
            off = running.enter_context(begin(serve_options)) if OFF in names else None
            on = running.enter_context(begin([*serve_options, *with_spans]))
            figures = compare(off, on, load, names, rounds)
        ours.send(None)
        spans = ours.recv()
    except (DeployError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        collector.kill()
        collector.join()
    if as_json:
        click.echo(json.dumps({"cpu_us_a_token": figures, "spans": spans}))
    else:
        _print(figures, load, spans)


if __name__ == "__main__":
    serve, own = split(sys.argv[1:])
    main(own, obj=serve)
