"""The hidden states of tokens between a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Hidden:
    """A sum, ``[T, hidden_size]``, whose last addend may be left to the norm that follows.

    Kernels of GPUs add and normalize at once: `Elementwise.adds_in_norms`.
    """

    residual: torch.Tensor
    addend: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> Hidden:
        """The hidden states of some of the tokens."""
        addend = None if self.addend is None else self.addend[rows]
        return Hidden(self.residual[rows], addend)
