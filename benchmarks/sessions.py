"""What sessions gain: conversations by turns, against the whole conversation with each request.

python -m benchmarks.sessions [its own options] -- [options of kvrelay serve]

Starts a cluster. Conversations of random tokens run at the same time, each turn as soon as the
one before has ended. Two ways take turns, round by round: by a session, which sends what is new,
and whole, which sends everything and relies on the prefix index. Each round has tokens and a
cache salt of its own. The figures leave each conversation's first turn out, but for what is
computed:

- TTFT: from the call to the first token, at the client.
- computed: tokens that all workers' forwards computed, those that they generated included.
- sent: tokens of prompts that the client has sent.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.with_cluster import started
from kvrelay.deploy.load_generator.table import table
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

_LEAST_TOKEN_ID = 100
"""Those below may be special ones."""


@dataclass(frozen=True)
class Load:
    """What is said in a round."""

    conversations: int
    turns: int
    new_tokens: int
    output_tokens: int


@dataclass
class Round:
    """What came of one."""

    by_session: bool
    seconds: float = 0.0
    computed_tokens: float = 0.0
    sent_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--conversations", default=16, show_default=True)
@click.option("--turns", default=6, show_default=True)
@click.option("--new-tokens", default=100, show_default=True, help="Of each turn's prompt.")
@click.option("--output-tokens", default=16, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="Of each way.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def main(rounds: int, serve_options: Sequence[str], **shape: int) -> None:
    """Run both ways in turn, and print a row for each round."""
    with started(serve_options, sys.stderr) as cluster:
        results = asyncio.run(run(cluster.target, Load(**shape), rounds))
    rows = [row(result) for result in results]
    print(table(["way", "seconds", "computed", "sent", "TTFT p50 ms", "p90", "p99"], rows))


def row(result: Round) -> list[str]:
    """One round's figures."""
    cuts = statistics.quantiles(result.ttfts, n=100)
    milliseconds = [f"{1000 * cuts[percent - 1]:.0f}" for percent in (50, 90, 99)]
    way = "session" if result.by_session else "whole"
    counts = [f"{result.computed_tokens:.0f}", str(result.sent_tokens)]
    return [way, f"{result.seconds:.1f}", *counts, *milliseconds]


async def run(target: str, load: Load, rounds: int) -> list[Round]:
    """The rounds, one warm-up left out."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await one_round(stub, load, 0, by_session=True)
        return [
            await one_round(stub, load, number, by_session=number % 2 == 1)
            for number in range(1, 2 * rounds + 1)
        ]


async def one_round(stub: Any, load: Load, number: int, *, by_session: bool) -> Round:
    """All conversations of a round, at the same time."""
    result = Round(by_session)
    before, begun = await computed_tokens(stub), time.monotonic()
    talks = [talk(stub, load, f"{number}-{one}", result) for one in range(load.conversations)]
    await asyncio.gather(*talks)
    result.seconds = time.monotonic() - begun
    result.computed_tokens = await computed_tokens(stub) - before
    return result


async def talk(stub: Any, load: Load, name: str, result: Round) -> None:
    """One conversation."""
    rng, history = random.Random(name), list[int]()
    if result.by_session:
        await stub.OpenSession(pb.OpenSessionRequest(session_id=name, cache_salt=name))
    for turn in range(load.turns):
        new = [rng.randrange(_LEAST_TOKEN_ID, 40_000) for _ in range(load.new_tokens)]
        sent = new if result.by_session else [*history, *new]
        result.sent_tokens += len(sent)
        request = pb.GenerateRequest(
            input_ids=pb.TokenIds(ids=sent),
            sampling_params=pb.SamplingParams(
                max_tokens=load.output_tokens, temperature=0, ignore_eos=True
            ),
            session_id=name if result.by_session else "",
            cache_salt="" if result.by_session else name,
        )
        ttft, output = await ask(stub, request)
        if turn:
            result.ttfts.append(ttft)
        history += [*new, *output]
    if result.by_session:
        await stub.CloseSession(pb.CloseSessionRequest(session_id=name))


async def ask(stub: Any, request: pb.GenerateRequest) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    begun, ttft, output = time.monotonic(), 0.0, list[int]()
    async for response in stub.Generate(request):
        if response.delta.token_ids and not output:
            ttft = time.monotonic() - begun
        output += response.delta.token_ids
    return ttft, output


async def computed_tokens(stub: Any) -> float:
    """By all workers so far."""
    workers = (await stub.GetServerInfo(pb.GetServerInfoRequest())).workers
    pages = await asyncio.gather(
        *(asyncio.to_thread(_scrape, worker.metrics_address) for worker in workers)
    )
    return sum(
        sample.value
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "kvrelay_computed_tokens_total"
    )


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text: str = response.read().decode()
        return text


if __name__ == "__main__":
    main()
