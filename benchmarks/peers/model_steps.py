"""Steps of decode of models with experts and with weights of 4 bits, beside vLLM's on a CPU.

python -m benchmarks.peers.model_steps --vllm .venv-peers

Models are random and scaled: layers of Qwen3-MoE with 128 experts of which a token goes to 8, and
layers of Qwen3 as by GPTQ. Times are CPU milliseconds of one thread. Ours are of a forward, vLLM's
of its engine, which schedules and samples, too. vLLM runs without torch.compile.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from safetensors.torch import save_file

from kvrelay.cpu_kernels.processor import describe_processor
from kvrelay.deploy.load_generator.table import table
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.runner import ModelRunner

PAGE_SIZE = 16
STEPS = range(17, 33)
TURNS = 4
GROUP: Final = 128
_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
}


def save_experts(folder: Path) -> None:
    """Save two layers with experts, in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **_SHAPE,
        num_hidden_layers=2,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def save_gptq(folder: Path) -> None:
    """Save eight dense layers with weights of 4 bits."""
    hidden, inner, dim = _SHAPE["hidden_size"], _SHAPE["intermediate_size"], _SHAPE["head_dim"]
    heads, kv_heads = _SHAPE["num_attention_heads"] * dim, _SHAPE["num_key_value_heads"] * dim
    products = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    torch.manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(hidden).bfloat16()}
    for name in ("model.embed_tokens", "lm_head"):
        table_shape = (_SHAPE["vocab_size"], hidden)
        tensors[f"{name}.weight"] = (torch.randn(table_shape) * 0.02).bfloat16()
    for layer in (f"model.layers.{index}." for index in range(8)):
        for name, size in norms.items():
            tensors[f"{layer}{name}.weight"] = torch.ones(size).bfloat16()
        for name, (outputs, inputs) in products.items():
            for part, values in _pack(outputs, inputs).items():
                tensors[f"{layer}{name}.{part}"] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "quantization_config": {**quantization, "sym": True, "checkpoint_format": "gptq"},
    }
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **fields}))


def _pack(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """Make random weights as GPTQ has them."""
    words = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int64)
    return {
        "qweight": words.to(torch.int32),
        "qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(inputs // GROUP, outputs) * 0.004 + 0.004).half(),
        "g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def time_ours(folder: Path, counts: list[int]) -> dict[int, float]:
    """The CPU milliseconds of a forward for each number of sequences."""
    runner = ModelRunner(folder, "bfloat16", "cpu", 1)
    took = {}
    for count in counts:
        pages = STEPS[-1] // PAGE_SIZE + 1
        geometries = runner.make_geometries(PAGE_SIZE)
        runner.bind([KVPool(one, count * pages, runner.device) for one in geometries])
        took[count] = min(_run(runner, count) for _ in range(TURNS)) * 1e3
    return took


def _run(runner: ModelRunner, count: int) -> float:
    """The CPU seconds of a step, the mean of several."""
    at = time.process_time()
    for length in STEPS:
        pages = length // PAGE_SIZE + 1
        runner.forward(
            ForwardBatch(
                input_ids=(5 + (7 * np.arange(count) + 31 * length) % 500).astype(np.int64),
                positions=np.full(count, length),
                query_start=np.arange(count + 1, dtype=np.int32),
                seq_lens=np.full(count, length + 1, np.int32),
                page_tables=(np.arange(count * pages, dtype=np.int32).reshape(count, pages),),
                logit_rows=np.arange(count),
            )
        )
    return (time.process_time() - at) / len(STEPS)


def time_vllm(vllm: Path, folder: Path, counts: list[int]) -> dict[int, float]:
    """The CPU milliseconds of a step of vLLM for each number of sequences."""
    script = Path(__file__).with_name("vllm_steps.py")
    ran = subprocess.run(  # noqa: S603 (this package's)
        [vllm / "bin" / "python", script, folder, ",".join(map(str, counts))],
        env={"LD_PRELOAD": str(vllm / "lib" / "libiomp5.so"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("step ")]
    return {int(count): float(took) for _, count, took in lines}


@click.command(context_settings={"show_default": True})
@click.option("--vllm", type=Path, required=True, help="The environment of vLLM.")
@click.option("--sequences", default="1,8,64", help="Sequences of a step, comma-separated.")
def main(vllm: Path, sequences: str) -> None:
    """Print what a step takes."""
    counts = [int(count) for count in sequences.split(",")]
    saves: dict[str, Callable[[Path], None]] = {
        "128 experts, 2 layers, bfloat16": save_experts,
        "dense, 8 layers, GPTQ of 4 bits": save_gptq,
    }
    click.echo(describe_processor())
    for name, save in saves.items():
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder))
            ours = time_ours(Path(folder), counts)
            theirs = time_vllm(vllm.absolute(), Path(folder), counts)
        lines = [[str(count), f"{ours[count]:.1f}", f"{theirs[count]:.1f}"] for count in counts]
        click.echo(f"\n{name}\n" + table(["sequences", "kvrelay, ms", "vLLM, ms"], lines))


if __name__ == "__main__":
    main()
