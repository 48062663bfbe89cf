"""Masks that are not made but described: attention asks which positions a token sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from kvrelay.model_runner.transformers_model.refusals import ModelCodeError

_ASKED_POSITIONS: Final = 24
"""The positions, evenly apart, at which a mask is compared with a window."""


@dataclass(frozen=True, eq=False)
class DescribedMask:
    """A mask by transformers' function ``(batch, head, query, key) -> bool``.

    It stands where model code expects a tensor, and is handed on to attention.
    """

    allows: Callable[..., torch.Tensor]

    # Some models look at these.
    dtype = torch.bool
    ndim = 4

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[queries, keys]`` bool, for positions of one sequence."""
        zero = torch.zeros((), dtype=torch.int64, device=queries.device)
        seen = self.allows(zero, zero, queries[:, None], keys[None, :])
        return torch.as_tensor(seen, device=queries.device).expand(len(queries), len(keys))


class Unbounded(Enum):
    """The answer for a mask that is no window."""

    ASK = "ask"
    """The mask has another form, such as chunks: it must be asked at every step."""


def find_window(mask: DescribedMask, longest: int) -> int | Unbounded | None:
    """Find the window of a mask for sequences of up to `longest` tokens; None: it has none.

    Raises:
        ModelCodeError: a token sees tokens after it, or not itself.
    """
    window = _count_seen(mask, longest - 1)
    # Beside its bounds, places that no window or chunk has a reason to prefer.
    places = {longest * step // _ASKED_POSITIONS for step in range(_ASKED_POSITIONS)}
    places |= {window + step for step in (-1, 0, 1)} | {2, 3, 5, 7, 11, 13, 17, 19}
    for place in sorted(one for one in places if 0 <= one < longest):
        if _count_seen(mask, place) != min(window, place + 1):
            return Unbounded.ASK
    return None if window >= longest else window


def _count_seen(mask: DescribedMask, position: int) -> int:
    """Count the tokens that end with `position` and are all that it sees; 0: there are gaps."""
    keys = torch.arange(position + 2)
    seen = mask.between(keys[position : position + 1], keys)[0]
    if seen[-1] or not seen[position]:
        raise ModelCodeError("tokens see tokens after them, or not themselves")
    count = int(seen.sum())
    return count if bool(seen[position + 1 - count : position + 1].all()) else 0
