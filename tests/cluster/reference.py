"""What transformers says of the same checkpoint: the truth that tokens are held against."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

LONG = 128
"""Prompts from here on are not padded together: that would cost more than it saves."""


class Reference:
    """Greedy generation by transformers in float32."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate_all(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """`generate` for prompts in ascending length: short ones eight at a time."""
        short = [prompt for prompt in prompts if len(prompt) < LONG]
        batches = [short[start : start + 8] for start in range(0, len(short), 8)]
        batches += [[prompt] for prompt in prompts[len(short) :]]
        return [tokens for batch in batches for tokens in self.generate(batch, max_tokens)]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The `max_tokens` tokens after each prompt, end-of-sequence tokens included.

        Several prompts are one batch, padded on the left.
        """
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(real),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        return output[:, longest:].tolist()
