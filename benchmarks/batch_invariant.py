"""What --batch-invariant costs a forward, and what it gives.

python -m benchmarks.batch_invariant

The same prompts and decode steps run through two runners, one in the mode and one not, turn by
turn; a ratio is that of the least CPU seconds of each. Below: how far a decode step's logits in a
batch of eight are from those alone, and a prompt's from those of the same tokens decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from benchmarks.sampling import SEQUENCES, Sequences, logits_of_both
from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.model_runner.runner import ModelRunner

CONTEXT = 512
STEPS = 6
REPETITIONS = 5
RESUMED_TOKENS = (60, 40)


def least_seconds(works: list[Callable[[], object]]) -> list[float]:
    """The least CPU seconds of each, taken turn by turn."""
    least = [float("inf")] * len(works)
    for _ in range(REPETITIONS):
        for index, work in enumerate(works):
            begun = time.process_time()
            work()
            least[index] = min(least[index], time.process_time() - begun)
    return least


def prompt_of(sequences: Sequences, tokens: np.ndarray) -> Callable[[], object]:
    """Computes a prompt, over and over."""
    return lambda: sequences.forward(range(1), tokens[None], 0)


def step_of(sequences: Sequences, tokens: np.ndarray, batch: int) -> Callable[[], object]:
    """Computes a decode step of `batch` sequences after `CONTEXT` tokens, over and over."""
    return lambda: sequences.forward(range(batch), tokens[:batch, CONTEXT : CONTEXT + 1], CONTEXT)


def prices(runners: list[ModelRunner], prompts: list[int]) -> list[list[str]]:
    """A line for each kind of forward: ms without and with the mode, and the ratio."""
    longest = max(*prompts, CONTEXT + 1)
    vocab = runners[0].config.vocab_size
    tokens = np.random.default_rng(1).integers(0, vocab, (SEQUENCES, longest))
    both = [Sequences(runner, longest) for runner in runners]
    lines = []

    def add(name: str, works: list[Callable[[], object]]) -> None:
        plain, invariant = least_seconds(works)
        lines.append(
            [name, f"{plain * 1e3:.1f}", f"{invariant * 1e3:.1f}", f"{invariant / plain:.2f}"]
        )

    for length in prompts:
        add(f"prompt of {length}", [prompt_of(one, tokens[0, :length]) for one in both])
    for one in both:
        one.forward(range(SEQUENCES), tokens[:, :CONTEXT], 0)
    for batch in (1, 2, SEQUENCES):
        add(f"step of {batch}", [step_of(one, tokens, batch) for one in both])
    return lines


def differences(runner: ModelRunner) -> list[str]:
    """The largest difference of logits: in a batch or alone, and as a prompt or decoded."""
    together, alone = logits_of_both(runner, STEPS)
    total, prompt = RESUMED_TOKENS
    tokens = np.random.default_rng(2).integers(0, runner.config.vocab_size, (1, total))
    whole = Sequences(runner, total).forward(range(1), tokens, 0)
    decoding = Sequences(runner, total)
    decoding.forward(range(1), tokens[:, :prompt], 0)
    for at in range(prompt, total):
        decoded = decoding.forward(range(1), tokens[:, at : at + 1], at)
    return [f"{np.abs(together - alone).max():.3g}", f"{np.abs(whole - decoded).max():.3g}"]


@click.command(context_settings={"show_default": True})
@click.option("--model", default=DEFAULT_MODEL, help="A checkpoint folder, or a name.")
@click.option("--prompts", default="128,1024", help="Tokens of prompts, comma-separated.")
def main(model: str, prompts: str) -> None:
    """Print the price and the effect of --batch-invariant."""
    path: Path = resolve_model(model, "bfloat16", users_models(), lambda _: None).path
    for dtype in ("bfloat16", "float32"):
        runners = [ModelRunner(path, dtype, "cpu", 1, batch_invariant=on) for on in (False, True)]
        lines = prices(runners, [int(length) for length in prompts.split(",")])
        print(f"\n{dtype}\n" + table(["forward", "ms", "ms in the mode", "ratio"], lines))
        lines = [
            [name, *differences(runner)]
            for name, runner in zip(("off", "on"), runners, strict=True)
        ]
        print("\n" + table(["mode", "batch of 8 or alone", "prompt or decoded"], lines))


if __name__ == "__main__":
    main()
