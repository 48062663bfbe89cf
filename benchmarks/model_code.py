"""A layer by transformers' model code beside the same by ours, and the host's part of both.

python -m benchmarks.model_code --model-type granite

Two random models of one architecture run the same steps, turn by turn, by both codes. A layer is
the difference of their least CPU seconds, divided by their difference in layers. The second table
has the same for a model so small that little but the host's work is left.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kvrelay.deploy.load_generator.table import table
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.runner import ModelRunner

CODES = (ModelCode.NATIVE, ModelCode.TRANSFORMERS)
LAYERS = (2, 10)
PAGE_SIZE = 16
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SECONDS = 0.3
"""The least time that a work is repeated for, of the host."""


def make_runners(
    model_type: str, shape: dict[str, Any], dtype: str, folder: Path
) -> list[list[ModelRunner]]:
    """For each code, a runner of each number of layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for layers in LAYERS:
        torch.manual_seed(0)
        sizes = {**shape, "vocab_size": 131, "num_hidden_layers": layers}
        config = AutoConfig.for_model(model_type, **sizes, pad_token_id=0, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / str(layers))
    return [
        [ModelRunner(folder / str(layers), dtype, "cpu", 1, model_code=code) for layers in LAYERS]
        for code in CODES
    ]


def make_batch(new: int) -> ForwardBatch:
    """`new` sequences of one token each after a few, or one prompt if they are many."""
    sequences, tokens = (1, new) if new > 64 else (new, 1)
    before = 0 if new > 64 else 31
    pages = -(-(before + tokens) // PAGE_SIZE)
    return ForwardBatch(
        input_ids=np.full(new, 7, np.int64),
        positions=np.tile(np.arange(before, before + tokens), sequences),
        query_start=np.arange(sequences + 1, dtype=np.int32) * tokens,
        seq_lens=np.full(sequences, before + tokens, np.int32),
        page_tables=(np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages),),
        logit_rows=np.array([new - 1]),
    )


def time_layers(runners: Sequence[Sequence[ModelRunner]], batch: ForwardBatch) -> list[float]:
    """The CPU seconds of one layer by each code."""
    works = [runner for pair in runners for runner in pair]
    for runner in works:
        geometries = runner.make_geometries(PAGE_SIZE)
        pages = batch.page_tables[0].size
        runner.bind([KVPool(one, pages, runner.device) for one in geometries])
        runner.forward(batch)
    least = dict.fromkeys(works, float("inf"))
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS * len(works):
        for runner in works:
            at = time.process_time()
            runner.forward(batch)
            least[runner] = min(least[runner], time.process_time() - at)
    fewer, more = LAYERS
    return [(least[large] - least[small]) / (more - fewer) for small, large in runners]


@click.command(context_settings={"show_default": True})
@click.option("--model-type", default="llama", help="A kind of transformers that both compute.")
@click.option("--dtype", default="bfloat16", help="bfloat16 or float32.")
@click.option("--tokens", default="1,8,256", help="New tokens of a step, comma-separated.")
def main(model_type: str, dtype: str, tokens: str) -> None:
    """Print what a layer costs by both codes."""
    counts = [int(count) for count in tokens.split(",")]
    header = ["tokens", *(f"{code}, us" for code in CODES), "ratio"]
    for name, shape in (("SmolLM2's size", SMOLLM2), ("hidden 64: the host's work", SMALL)):
        lines = []
        with tempfile.TemporaryDirectory() as folder:
            runners = make_runners(model_type, shape, dtype, Path(folder))
            for count in counts:
                ours, theirs = time_layers(runners, make_batch(count))
                ratio = f"{theirs / ours:.2f}"
                lines.append([str(count), f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f}", ratio])
        print(f"\na layer of {model_type} in {dtype}, {name}\n" + table(header, lines))


if __name__ == "__main__":
    main()
