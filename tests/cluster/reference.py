"""What transformers says of the same checkpoint: the truth that tokens are held against."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """Greedy generation by transformers in float32."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The `max_tokens` tokens after `prompt`, end-of-sequence tokens included."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()
