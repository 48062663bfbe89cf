"""The CPU milliseconds of vLLM's steps of decode; runs in vLLM's own environment.

python vllm_steps.py MODEL 1,8,64

A line for each number of sequences. A step is what sixteen more tokens take, divided by sixteen.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

MORE = 16
TURNS = 3
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(model: str, counts: list[int]) -> None:
    """Print the milliseconds of a step for each number of sequences."""
    os.environ.update(ENVIRONMENT)
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=max(counts),
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    def generate(count: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [5 + (7 * index + place) % 500 for place in range(16)]}
            for index in range(count)
        ]
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        least = float("inf")
        for _ in range(TURNS):
            at = time.process_time()
            engine.generate(prompts, sampling, use_tqdm=False)
            least = min(least, time.process_time() - at)
        return least

    for count in counts:
        generate(count, 2)
        took = generate(count, 1 + MORE) - generate(count, 1)
        print(f"step {count} {took / MORE * 1e3:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(count) for count in sys.argv[2].split(",")])
