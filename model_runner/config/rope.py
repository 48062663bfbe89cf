"""The turning of positions into angles, and the ways to stretch it to longer contexts.

Every formula is the one of `transformers.modeling_rope_utils`, down to the
order of its float32 operations: a frequency that differs in its last bit turns
into a different angle some thousand positions later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Rope(Protocol):
    """A kind of rotary position embedding (`rope_type`) with its parameters."""

    @property
    def attention_factor(self) -> float:
        """The factor that cosines and sines are multiplied by."""
        ...

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """Radians a position, ``[head_dim / 2]`` float32."""
        ...


def _default_inv_freq(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """The original: Su et al., RoFormer (arXiv 2104.09864)."""

    theta: float
    attention_factor: float = 1.0

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """``theta ** (-2 * i / head_dim)`` radians a position, ``[head_dim / 2]`` float32."""
        return _default_inv_freq(self.theta, head_dim)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by a factor: Chen et al. (arXiv 2306.15595)."""

    theta: float
    factor: float
    attention_factor: float = 1.0

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """The frequencies of `DefaultRope` divided by `factor`: ``[head_dim / 2]`` float32."""
        return _default_inv_freq(self.theta, head_dim) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Slow frequencies divided by a factor, fast ones kept, a ramp between: Llama 3.1."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """The frequencies of `DefaultRope`, slow ones divided: ``[head_dim / 2]`` float32."""
        plain = _default_inv_freq(self.theta, head_dim)
        wavelength = 2 * math.pi / plain
        slow = wavelength > self.original_max_position_embeddings / self.low_freq_factor
        fast = wavelength < self.original_max_position_embeddings / self.high_freq_factor
        ramp = (self.original_max_position_embeddings / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - ramp) * plain / self.factor + ramp * plain
        return torch.where(slow, plain / self.factor, torch.where(fast, plain, between))


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Interpolation by parts with an attention temperature: Peng et al. (arXiv 2309.00071)."""

    theta: float
    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """The frequencies of `DefaultRope`, slow ones interpolated: ``[head_dim / 2]`` float32."""
        powers = self.theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
        low, high = self._ramp_bounds(head_dim)
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
        kept = 1 - torch.clamp(ramp, 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _ramp_bounds(self, head_dim: int) -> tuple[float, float]:
        low = self._dim_turning(self.beta_fast, head_dim)
        high = self._dim_turning(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high

    def _dim_turning(self, rotations: float, head_dim: int) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(self.theta))
