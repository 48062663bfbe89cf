"""What sessions gain, and who should compute a long turn of one.

python -m benchmarks.sessions [its own options] -- [options of kvrelay serve]

Conversations of random tokens run at the same time, each turn as soon as the one before has
ended. The ways of a part take turns, round by round; each round has tokens and a cache salt of
its own.

Part `chat`, on one cluster, has short turns:

- session: sends what is new;
- prefix cache: sends the whole conversation each time, and finds what the prefix index has;
- no cache: the same with another salt each time, so that nothing is found.

Part `many` is the first two of these with 100 conversations, on workers with memory for all of
them. `no cache` would compute 780,000 tokens a round, which takes two cores over six minutes; so
would any way whose conversations do not fit into memory, as each evicts the next one's.

Part `long` has turns that are long enough for a prefill worker (P), while a decode worker (D) has
the session and generates for others. It runs without a prefix index unless told otherwise, on two
clusters that take turns:

- read: P reads the session's KV from D, and D reads the rest from P;
- recomputed: D keeps nothing (`max_kept_tokens` is 0, no prefix index): P computes, D reads all;
- local: the worker that has the session computes the turn beside what it generates, as a decode
  worker does with short ones. It is an aggregated one, which is sure to do so.

Figures leave each conversation's first turn out, but for what is computed:

- TTFT: from the call to the first token, at the client.
- computed: tokens that all workers' forwards computed, those that they generated included.
- sent: tokens of prompts that the client has sent.
- ITL: between two messages of the streams that run beside a long turn.
- read: histories that P has read and D has confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
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
_STREAM_TOKENS = 256
"""Of one output of a stream; then it asks anew."""
_ANYWHERE = [
    part for door in ("grpc", "http", "admin", "metrics") for part in (f"--{door}", "127.0.0.1:0")
]
PAGE = Path("docs/bench-sessions.md")
_FIGURES = "\n## Figures\n"


class Way(StrEnum):
    """How a conversation is had."""

    SESSION = "session"
    PREFIXES = "prefix cache"
    ANEW = "no cache"
    READ = "read"
    RECOMPUTED = "recomputed"
    LOCAL = "local"

    @property
    def by_session(self) -> bool:
        """It sends what is new alone."""
        return self not in (Way.PREFIXES, Way.ANEW)


class Part(StrEnum):
    """What is compared."""

    CHAT = "chat"
    MANY = "many"
    LONG = "long"


WAYS = {
    Part.CHAT: (Way.SESSION, Way.PREFIXES, Way.ANEW),
    Part.MANY: (Way.SESSION, Way.PREFIXES),
    Part.LONG: (Way.READ, Way.RECOMPUTED, Way.LOCAL),
}
MANY_MEMORY = "5GiB"
"""Of each worker: 100 conversations of 8 times 216 tokens are 3.7 GiB of SmolLM2's KV."""
_PARTS = [part.value for part in Part]
_WAYS = [way.value for way in Way]


@dataclass(frozen=True)
class Load:
    """What is said in a round."""

    conversations: int
    turns: int
    first_tokens: int
    """Of a conversation's first prompt."""
    new_tokens: int
    """Of each later one."""
    output_tokens: int
    streams: int = 0
    """Requests that generate all the time."""

    def __str__(self) -> str:
        text = f"{self.conversations} conversations at once, {self.turns} turns, "
        text += f"{self.first_tokens} tokens in the first prompt and {self.new_tokens} in the "
        text += f"others, {self.output_tokens} of each output"
        return text + (f"; beside {self.streams} streams" if self.streams else "")


@dataclass
class Round:
    """What came of one."""

    way: str
    seconds: float = 0.0
    computed_tokens: float = 0.0
    sent_tokens: int = 0
    history_reads: float = 0.0
    ttfts: list[float] = field(default_factory=list)
    """Seconds."""
    itls: list[float] = field(default_factory=list)
    """Seconds, of the streams."""


@click.command(
    context_settings={"ignore_unknown_options": True, "show_default": True}, help=__doc__
)
@click.option("--part", "parts", type=click.Choice(_PARTS), multiple=True, default=_PARTS)
@click.option(
    "--way",
    "ways",
    type=click.Choice([*Way]),
    multiple=True,
    default=[*Way],
    help="Of those parts.",
)
@click.option("--rounds", default=2, help="Of each way.")
@click.option("--conversations", default=10, help="Of part chat.")
@click.option("--many-conversations", default=100, help="Of part many.")
@click.option("--turns", default=8, help="Of parts chat and many.")
@click.option("--new-tokens", default=200, help="Of each prompt of parts chat and many.")
@click.option("--output-tokens", default=16, help="Of parts chat and many.")
@click.option("--long-conversations", default=2)
@click.option("--long-turns", default=4)
@click.option("--long-tokens", default=400, help="Of each prompt of part long.")
@click.option("--long-output-tokens", default=32)
@click.option("--streams", default=3, help="That generate beside part long.")
@click.option("--write", is_flag=True, help=f"Write the parts that ran into {PAGE}.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def main(
    parts: Sequence[str],
    ways: Sequence[str],
    rounds: int,
    write: bool,
    serve_options: Sequence[str],
    **shape: int,
) -> None:
    """Run the parts, and print a row for each way."""
    new, tokens = shape["new_tokens"], shape["long_tokens"]
    short = (shape["turns"], new, new, shape["output_tokens"])
    loads = {
        Part.CHAT: Load(shape["conversations"], *short),
        Part.MANY: Load(shape["many_conversations"], *short),
        Part.LONG: Load(
            shape["long_conversations"],
            shape["long_turns"],
            tokens,
            tokens,
            shape["long_output_tokens"],
            shape["streams"],
        ),
    }
    sections = {}
    for part in map(Part, parts):
        conditions = _conditions()
        chosen = [way for way in WAYS[part] if way in ways]
        with clusters(part, serve_options) as targets:
            results = asyncio.run(run(targets, loads[part], chosen, rounds))
        sections[part.value] = "\n".join((f"{loads[part]}. {conditions}", "", *rows(results)))
        click.echo(f"\n{part}: {sections[part.value]}")
    if write:
        write_page(PAGE, sections)


@contextlib.contextmanager
def clusters(part: Part, serve_options: Sequence[str]) -> Iterator[Mapping[Way, str]]:
    """Where each way of a part is served; clusters that are not used are idle."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> str:
            every = [*_ANYWHERE, *options, *serve_options]
            return stack.enter_context(started(every, sys.stderr)).target

        if part is not Part.LONG:
            target = start(*("--kv-memory", MANY_MEMORY) * (part is Part.MANY))
            yield dict.fromkeys(WAYS[part], target)
            return
        long = ("--prefix-index", "none", "--threads", "1")
        pair = start(*long, "--placement", "disaggregated")
        alone = start(*long, "--aggregated", "1")
        yield {Way.READ: pair, Way.RECOMPUTED: pair, Way.LOCAL: alone}


def rows(results: Sequence[Round]) -> list[str]:
    """The lines of a table: a row for each way, and in each cell a figure for each round."""
    with_streams = any(result.itls for result in results)
    head = ["way", "TTFT p50 ms", "TTFT p99 ms", "computed", "sent", "seconds"]
    head += ["ITL p50 ms", "ITL p99 ms", "read"] if with_streams else []
    lines = []
    for way in dict.fromkeys(result.way for result in results):
        own = [result for result in results if result.way == way]
        cells = [
            [_milliseconds(result.ttfts, 50) for result in own],
            [_milliseconds(result.ttfts, 99) for result in own],
            [f"{result.computed_tokens:.0f}" for result in own],
            [str(result.sent_tokens) for result in own],
            [f"{result.seconds:.1f}" for result in own],
        ]
        if with_streams:
            cells.append([_milliseconds(result.itls, 50) for result in own])
            cells.append([_milliseconds(result.itls, 99) for result in own])
            cells.append([f"{result.history_reads:.0f}" for result in own])
        lines.append([way, *(", ".join(cell) for cell in cells)])
    return table(head, lines).splitlines()


def _milliseconds(seconds: Sequence[float], percent: int) -> str:
    """A percentile of some times; of few it is the nearest of them."""
    if len(seconds) < 2:
        return "-"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{1000 * cuts[percent - 1]:.0f}"


def _conditions() -> str:
    """What must be known of the machine to read the figures."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({platform.machine()}), load before the run {load:.1f}."


def write_page(page: Path, sections: Mapping[str, str]) -> None:
    """Write the figures of these parts; the text above them stays, and other parts' figures do."""
    data = page.with_suffix(".json")
    known = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    known |= dict(sections)
    data.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    kept = page.read_text(encoding="utf-8").partition(_FIGURES)[0]
    lines = [f"### {part.capitalize()}\n\n{known[part]}\n" for part in Part if part in known]
    page.write_text("\n".join((kept + _FIGURES, *lines)), encoding="utf-8")


async def run(
    targets: Mapping[Way, str], load: Load, ways: Sequence[Way], rounds: int
) -> list[Round]:
    """The rounds; one of each way before them only warms up."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = {}
        for target in dict.fromkeys(targets.values()):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
            stubs[target] = inference_pb2_grpc.InferenceServiceStub(channel)
        results = []
        for number in range(rounds + 1):
            for way in ways:
                result = await one_round(stubs[targets[way]], load, way, number)
                click.echo(f"{way}: {result.seconds:.1f} s", err=True)
                if number:
                    results.append(result)
        return results


async def one_round(stub: Any, load: Load, way: Way, number: int) -> Round:
    """All conversations of a round, at the same time. A warm-up, number 0, has a few."""
    result, conversations = Round(way), load.conversations if number else 2
    async with streaming(stub, load.streams, result):
        before, begun = await counters(stub), time.monotonic()
        talks = [talk(stub, load, f"{way}/{number}/{one}", result) for one in range(conversations)]
        await asyncio.gather(*talks)
        result.seconds, after = time.monotonic() - begun, await counters(stub)
    result.computed_tokens = after["computed"] - before["computed"]
    result.history_reads = after["read"] - before["read"]
    return result


@contextlib.asynccontextmanager
async def streaming(stub: Any, streams: int, result: Round) -> AsyncIterator[None]:
    """Let so many requests generate, once each has its first token, until this context ends."""
    begun = [asyncio.Event() for _ in range(streams)]
    tasks = [
        asyncio.create_task(stream(stub, number, event, result))
        for number, event in enumerate(begun)
    ]
    try:
        for event in begun:
            await event.wait()
        result.itls.clear()
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):  # it was not cancelled
            raise end


async def stream(stub: Any, number: int, begun: asyncio.Event, result: Round) -> None:
    """Generate without an end, and note the times between messages."""
    prompt = [_LEAST_TOKEN_ID + number, *range(_LEAST_TOKEN_ID, _LEAST_TOKEN_ID + 15)]
    try:
        while True:
            last: float | None = None
            async for response in stub.Generate(_request(prompt, _STREAM_TOKENS)):
                if response.delta.token_ids:
                    now = time.monotonic()
                    if last is not None:
                        result.itls.append(now - last)
                    last = now
                    begun.set()
    finally:
        begun.set()


async def talk(stub: Any, load: Load, name: str, result: Round) -> None:
    """One conversation."""
    way = Way(result.way)
    rng, history = random.Random(name), list[int]()
    if way.by_session:
        open_session = pb.OpenSessionRequest(session_id=name, cache_salt=name)
        if way is Way.RECOMPUTED:
            open_session.max_kept_tokens = 0
        await stub.OpenSession(open_session)
    for turn in range(load.turns):
        count = load.new_tokens if turn else load.first_tokens
        new = [rng.randrange(_LEAST_TOKEN_ID, 40_000) for _ in range(count)]
        sent = new if way.by_session else [*history, *new]
        result.sent_tokens += len(sent)
        request = _request(sent, load.output_tokens)
        if way.by_session:
            request.session_id = name
        else:
            request.cache_salt = f"{name}/{turn}" if way is Way.ANEW else name
        ttft, output = await ask(stub, request)
        if turn:
            result.ttfts.append(ttft)
        history += [*new, *output]
    if way.by_session:
        await stub.CloseSession(pb.CloseSessionRequest(session_id=name))


def _request(prompt: Sequence[int], output_tokens: int) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    return pb.GenerateRequest(input_ids=pb.TokenIds(ids=prompt), sampling_params=params)


async def ask(stub: Any, request: pb.GenerateRequest) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    begun, ttft, output = time.monotonic(), 0.0, list[int]()
    async for response in stub.Generate(request):
        if response.delta.token_ids and not output:
            ttft = time.monotonic() - begun
        output += response.delta.token_ids
    return ttft, output


async def counters(stub: Any) -> dict[str, float]:
    """Tokens that all workers have computed, and histories that they have read, so far."""
    workers = (await stub.GetServerInfo(pb.GetServerInfoRequest())).workers
    pages = await asyncio.gather(
        *(asyncio.to_thread(_scrape, worker.metrics_address) for worker in workers)
    )
    counts = {"computed": 0.0, "read": 0.0}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "kvrelay_computed_tokens_total":
                    counts["computed"] += sample.value
                elif sample.name == "kvrelay_history_reads_total":
                    counts["read"] += sample.value * (sample.labels["outcome"] == "valid")
    return counts


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text: str = response.read().decode()
        return text


if __name__ == "__main__":
    main()
