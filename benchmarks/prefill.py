"""What a step's forward is spent on, and what a second thread of the process gains.

python -m benchmarks.prefill [--rows 8] [--tokens 0] [--before 900]

A step computes a prompt, or rows of requests that generate, or both.

A figure is the median over rounds; in each round every part and every number of threads has its
turn, and a ratio is the median of the rounds' ratios. The parts:

- whole: the forward.
- linear: its matrix products alone, of the same shapes, with random weights.
- attention: that of all layers alone, keys and values written to their pages.
- torch's attention: the same by the backend for other devices, which gathers pages and calls torch.

On a busy machine `--clock cpu` is the better one, for one thread: it counts the CPU time of the
process. Figures of two threads need two idle cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import torch

from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.backend import AttentionBackend, AttentionFactory
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.model_config import GQAConfig, ModelConfig
from kvrelay.model_runner.layers.linear import Linear, LinearFactory
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.torch_options import parse_dtype

PAGE_SIZE = 16
TORCH = "torch's attention"

Part = Callable[[], object]


class Products:
    """The matrix products of a model with grouped-query attention, without what is between."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tokens: int, ends: int) -> None:
        heads = config.attention
        if not isinstance(heads, GQAConfig):
            raise click.UsageError("only models with grouped-query attention can be measured")
        self._factory, self._dtype, self._ends = LinearFactory(), dtype, ends
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = heads.num_heads * heads.head_dim
        qkv = queries + 2 * heads.num_kv_heads * heads.head_dim
        shapes = [(qkv, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
        self._layers = [[self._make(*shape) for shape in shapes] for _ in config.layers]
        self._head = self._make(config.vocab_size, hidden)
        self._hidden, self._queries, self._inner = (
            torch.randn(tokens, size).to(dtype) for size in (hidden, queries, inner)
        )

    def _make(self, outputs: int, inputs: int) -> Linear:
        return self._factory.make(torch.randn(outputs, inputs).to(self._dtype))

    def run(self) -> None:
        """Those of one step: behind the last attention only sequences' last tokens go on."""
        last = len(self._layers) - 1
        for index, (qkv, output, gate_up, down) in enumerate(self._layers):
            qkv(self._hidden)
            output.add_to(self._hidden, self._queries)
            rows = slice(-self._ends, None) if index == last else slice(None)
            gate_up(self._hidden[rows])
            down.add_to(self._hidden[rows], self._inner[rows])
        self._head(self._hidden[-self._ends :])


def make_batch(
    tokens: int, before: int, rows: int, context: int, vocab_size: int, pools: int
) -> ForwardBatch:
    """Random tokens of a prompt behind `before` others, and rows that end a `context` each.

    All in scattered pages.
    """
    counts = np.array([tokens] * (tokens > 0) + [1] * rows)
    lengths = np.array([before + tokens] * (tokens > 0) + [context] * rows)
    starts = np.concatenate(([0], np.cumsum(counts)))
    generator, width = np.random.default_rng(1), -(-int(lengths.max()) // PAGE_SIZE)
    pages = generator.permutation(len(lengths) * width).astype(np.int32)
    ends = zip(lengths - counts, lengths, strict=True)
    return ForwardBatch(
        input_ids=generator.integers(0, vocab_size, starts[-1]),
        positions=np.concatenate([np.arange(*one) for one in ends]),
        query_start=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        page_tables=(pages.reshape(len(lengths), width),) * pools,
        logit_rows=starts[1:] - 1,
    )


class Bench:
    """One model with so many threads, and the parts of its forward."""

    def __init__(self, runner: ModelRunner, products: Products, batch: ForwardBatch) -> None:
        self._runner, self._batch = runner, batch
        pages = batch.page_tables[0].size
        geometries = runner.make_geometries(PAGE_SIZE)
        self._pools = [KVPool(one, pages, runner.device) for one in geometries]
        runner.bind(self._pools)
        assert isinstance(runner.config, ModelConfig)
        heads = self._heads = runner.config.attention
        geometry = geometries[0]
        count = heads.query_heads.num_heads + geometry.parts * geometry.num_kv_heads
        rows = torch.randn(len(batch.positions), count, geometry.head_dim)
        self._rows = rows.to(runner.dtype)
        fastest = AttentionFactory(
            AttentionChoice.AUTO, geometries, runner.dtype, heads.query_heads, runner.device
        )
        self.parts: dict[str, Part] = {
            "whole": lambda: runner.forward(batch),
            "linear": products.run,
            "attention": self._attention(lambda pool, _: fastest.make(pool)),
            TORCH: self._attention(TorchAttention),
        }

    def _attention(self, make: Callable[..., AttentionBackend]) -> Part:
        heads = self._heads.query_heads
        backends = [make(pool, heads) for pool in self._pools]

        def run() -> None:
            for backend, page_table in zip(backends, self._batch.page_tables, strict=True):
                step = backend.plan(self._batch, page_table)
                for layer in range(self._pools[0].geometry.num_layers):
                    step.attend(layer, self._rows)

        return run


def measure(
    benches: dict[int, Bench], rounds: int, clock: Callable[[], float]
) -> dict[tuple[int, str], list[float]]:
    """Milliseconds of each round, by threads and part; a round before them is not counted."""
    found: dict[tuple[int, str], list[float]] = {}
    for number in range(rounds + 1):
        for threads, bench in benches.items():
            torch.set_num_threads(threads)
            for name, part in bench.parts.items():
                begun = clock()
                with torch.inference_mode():
                    part()
                if number:
                    found.setdefault((threads, name), []).append((clock() - begun) * 1e3)
    return found


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """The median of the rounds' ratios, and their range."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def report(found: dict[tuple[int, str], list[float]]) -> str:
    """A line for each number of threads and part."""
    first = min(threads for threads, _ in found)
    lines = [
        [
            name,
            str(threads),
            f"{statistics.median(each):.0f}",
            ratio(each, found[threads, "linear"]),
            ratio(found[first, name], each),
        ]
        for (threads, name), each in found.items()
    ]
    header = ["part", "threads", "ms", "to linear", f"{first} thread to this"]
    return table(header, lines)


@click.command(context_settings={"show_default": True})
@click.option("--model", default=DEFAULT_MODEL, help="A checkpoint folder, or a name.")
@click.option("--dtype", default="bfloat16", help="Of weights, activations and KV.")
@click.option("--tokens", type=click.IntRange(min=0), default=1024, help="Of the prompt; 0: none.")
@click.option("--before", type=click.IntRange(min=0), default=0, help="Tokens of it before those.")
@click.option("--rows", type=click.IntRange(min=0), default=0, help="Requests that generate.")
@click.option("--context", type=click.IntRange(min=1), default=320, help="Tokens of each of them.")
@click.option("--threads", default="1,2", help="Numbers of threads, comma-separated.")
@click.option("--rounds", default=9)
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall")
def main(
    model: str,
    dtype: str,
    tokens: int,
    before: int,
    rows: int,
    context: int,
    threads: str,
    rounds: int,
    clock: str,
) -> None:
    """Print the parts of a step's forward."""
    if not tokens + rows:
        raise click.UsageError("give --tokens or --rows: a step computes something")
    path: Path = resolve_model(model, dtype, users_models(), lambda _: None).path
    benches: dict[int, Bench] = {}
    for count in [int(one) for one in threads.split(",")]:
        runner = ModelRunner(path, dtype, "cpu", count)
        assert isinstance(runner.config, ModelConfig)
        with torch.inference_mode():
            ends = rows + (tokens > 0)
            products = Products(runner.config, parse_dtype(dtype), tokens + rows, ends)
            pools = len(runner.config.pool_layers)
            batch = make_batch(tokens, before, rows, context, runner.config.vocab_size, pools)
            benches[count] = Bench(runner, products, batch)
    now = time.perf_counter if clock == "wall" else time.process_time
    print(report(measure(benches, rounds, now)))


if __name__ == "__main__":
    main()
