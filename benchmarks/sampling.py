"""What sampling costs a step, and how often rounding changes a token.

python -m benchmarks.sampling

A stream that fails over, or is decoded in another batch, has other rounding errors in its
logits. Eight sequences of random tokens are decoded token by token, once together and once
each alone; from both logits of each position a token is drawn with each of many seeds. A
figure is the number of draws that differ. Beside the draw of kvrelay stands one by the
inverse of the cumulated probabilities, tokens in order of their ids, which kvrelay had
before and which many engines have.

The cost is that of drawing for 32 rows of logits, one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch

from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling.sampler import (
    Float32Array,
    SamplingRow,
    filter_top_k_top_p_min_p,
    sample_token_id,
)
from kvrelay.wire.submit import SamplingParams

SEQUENCES = 8
PROMPT_TOKENS = 64
PAGE_SIZE = 16
COST_ROWS = 32
REPETITIONS = 9
TOP_PS = (1.0, 0.9)

Draw = Callable[[Float32Array, SamplingRow], int]


class Sequences:
    """Sequences of one model, each with pages of its own, in order."""

    def __init__(self, runner: ModelRunner, capacity: int) -> None:
        self._runner = runner
        geometries = runner.make_geometries(PAGE_SIZE)
        self._pages = geometries[0].pages_for(capacity)
        runner.bind([KVPool(one, SEQUENCES * self._pages, runner.device) for one in geometries])
        self._pools = len(geometries)

    def forward(self, which: range, tokens: np.ndarray, start: int) -> Float32Array:
        """Logits ``[sequences, vocab]`` after ``tokens [sequences, n]``, which begin at `start`."""
        count, new = tokens.shape
        tables = np.arange(SEQUENCES * self._pages, dtype=np.int32).reshape(SEQUENCES, -1)
        batch = ForwardBatch(
            input_ids=tokens.reshape(-1),
            positions=np.tile(np.arange(start, start + new), count),
            query_start=np.arange(0, count * new + 1, new, dtype=np.int32),
            seq_lens=np.full(count, start + new, np.int32),
            page_tables=(tables[list(which)],) * self._pools,
            logit_rows=np.arange(new - 1, count * new, new),
        )
        logits: Float32Array = self._runner.forward(batch).cpu().numpy().copy()
        return logits


def logits_of_both(runner: ModelRunner, steps: int) -> tuple[Float32Array, Float32Array]:
    """Logits ``[steps * sequences, vocab]`` of the same positions, decoded together and alone."""
    length = PROMPT_TOKENS + steps
    random = np.random.default_rng(1)
    tokens = random.integers(0, runner.config.vocab_size, (SEQUENCES, length))
    runs = []
    for groups in ([range(SEQUENCES)], [range(n, n + 1) for n in range(SEQUENCES)]):
        sequences = Sequences(runner, length)
        rows = []
        for group in groups:
            sequences.forward(group, tokens[list(group), :PROMPT_TOKENS], 0)
        for at in range(PROMPT_TOKENS, length):
            rows += [
                sequences.forward(group, tokens[list(group), at : at + 1], at) for group in groups
            ]
        runs.append(np.concatenate(rows))
    return runs[0], runs[1]


def draw_by_inverse_cdf(logits: Float32Array, row: SamplingRow) -> int:
    """The token at a uniform number's place among the cumulated probabilities."""
    weights = np.exp(logits - logits.max())
    kept = np.arange(len(weights))
    if row.params.top_p < 1:
        kept = filter_top_k_top_p_min_p(weights, row.params)
    sums = np.cumsum(weights[kept], dtype=np.float64)
    point = np.random.Generator(
        np.random.Philox(key=row.params.seed, counter=row.position)
    ).random()
    return int(kept[min(np.searchsorted(sums, point * sums[-1], side="right"), len(kept) - 1)])


def draw_by_gumbel(logits: Float32Array, row: SamplingRow) -> int:
    """As kvrelay draws."""
    token_id = sample_token_id(logits, row)
    assert isinstance(token_id, int)
    return token_id


def count_changes(
    draw: Draw, together: Float32Array, alone: Float32Array, params: SamplingParams, seeds: int
) -> int:
    """How many of ``rows * seeds`` draws differ between the two logits of a row."""
    changes = 0
    for position, (one, other) in enumerate(zip(together, alone, strict=True)):
        for seed in range(seeds):
            row = SamplingRow(SamplingParams(top_p=params.top_p, seed=seed), position, (), ())
            changes += draw(one, row) != draw(other, row)
    return changes


def milliseconds(draw: Draw, logits: Float32Array, params: SamplingParams) -> float:
    """For `COST_ROWS` rows; the median of some repetitions."""
    rows = [SamplingRow(params, position, (), ()) for position in range(COST_ROWS)]
    seconds = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        for row in rows:
            draw(logits[row.position % len(logits)], row)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e3


def measure(path: Path, dtype: str, steps: int, draws: int) -> list[list[str]]:
    """A line of the table for each mode."""
    together, alone = logits_of_both(ModelRunner(path, dtype, "cpu", 1), steps)
    lines = []
    for top_p in TOP_PS:
        params = SamplingParams(top_p=top_p)
        # A nucleus takes long to find.
        seeds = max(1, draws // len(together) // (1 if params.top_p == 1 else 10))
        total = seeds * len(together)
        counts = [
            count_changes(draw, together, alone, params, seeds)
            for draw in (draw_by_inverse_cdf, draw_by_gumbel)
        ]
        costs = [
            milliseconds(draw, together, params) for draw in (draw_by_inverse_cdf, draw_by_gumbel)
        ]
        figures = [*map(str, counts), *(f"{cost:.1f}" for cost in costs)]
        lines.append([dtype, f"{top_p:g}", str(total), *figures])
    return lines


@click.command()
@click.option("--model", help="A checkpoint; as `kvrelay serve --model`.", default=DEFAULT_MODEL)
@click.option("--steps", default=25, show_default=True, help="Positions of each sequence.")
@click.option("--draws", default=100_000, show_default=True, help="Draws of each kind at top_p 1.")
def main(model: str, steps: int, draws: int) -> None:
    """Print how many draws rounding changes, and what a draw costs."""
    path = resolve_model(model, "bfloat16", users_models(), lambda _: None).path
    with torch.inference_mode():
        lines = [
            line for dtype in ("float32", "bfloat16") for line in measure(path, dtype, steps, draws)
        ]
    header = ["dtype", "top_p", "draws", "changed: inverse CDF", "changed: Gumbel"]
    header += [f"ms for {COST_ROWS} rows: inverse CDF", "Gumbel"]
    print(table(header, lines))


if __name__ == "__main__":
    main()
