"""What a model's layers have made of tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Hidden:
    """A sum, ``[T, hidden_size]``, whose last addend may be left to the norm that follows.

    There kernels of GPUs add and normalize at once: `Elementwise.adds_in_norms`.
    """

    residual: torch.Tensor
    addend: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> Hidden:
        """Some of the tokens."""
        addend = None if self.addend is None else self.addend[rows]
        return Hidden(self.residual[rows], addend)
