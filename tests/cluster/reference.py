"""What transformers says of the same checkpoint: the truth that tokens are held against."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """Greedy decoding by transformers in float32.

    An output is greedy if each of its tokens is the likeliest after all those
    before it. That takes one forward over prompt and output instead of one a
    token, and says the same: where the first tokens are those that greedy
    decoding gives, the next is asked for after just these.
    """

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}
        """The longest output after a prompt that is known to be greedy."""

    def assert_greedy(self, prompts: list[list[int]], outputs: list[list[int]], count: int) -> None:
        """Each output is the `count` tokens after its prompt, end-of-sequence tokens included."""
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output) == count, f"{len(output)} tokens after {len(prompt)}"
            known = self._known.get(tuple(prompt), [])
            if output == known[:count]:
                continue
            with torch.inference_mode():
                tokens = torch.tensor([prompt + output[:-1]])
                logits = self._model(tokens, logits_to_keep=count).logits[0]
            likeliest = logits.argmax(dim=-1).tolist()
            assert output == likeliest, f"after {len(prompt)} tokens"
            self._known[tuple(prompt)] = output
