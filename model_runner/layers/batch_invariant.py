"""Products whose rows do not depend, to the last bit, on how many rows there are.

A library picks a kernel by a product's shape. One that splits the inner dimension for a single row,
say, adds in another order than the one for many. So the same token in another batch gets other
logits (He and others, "Defeating nondeterminism in LLM inference", thinkingmachines.ai 2025). On a
CPU oneDNN and MKL were found to use one order from some small number of rows on. Here that number
is found by trial, and fewer rows are padded. Some products in float32 have no such number: they are
computed in blocks of one size. A kernel of our own that has one order by design
(`kernels/product.py`) needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvrelay.model_runner.errors import UnsupportedOptionError

_MOST_ROWS = 256
"""The trial covers no larger product, so more rows are computed in blocks."""
_FEWEST_ROWS = (1, 2, 4, 8, 16)
_BLOCK_SIZES = (16, 32)
_TRIED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128)
_TRIED_BLOCKS = 64
"""The most blocks of each number of rows: few of bfloat16's results show another order."""
_SEED = 1


RowwiseProduct: TypeAlias = Callable[..., torch.Tensor]
"""A function of rows ``[T, ...]`` of each argument to rows ``[T, ...]``, each by itself."""


@dataclass(frozen=True, slots=True)
class RowBounds:
    """How many rows a product may have at once to be batch invariant."""

    fewest: int
    most: int

    def apply(self, product: RowwiseProduct, *rows: torch.Tensor) -> torch.Tensor:
        """The product of ``rows [T, ...]``: padded if there are too few, in blocks if too many."""
        count = len(rows[0])
        rows = tuple(one.contiguous() for one in rows)
        if self.fewest <= count <= self.most:
            return product(*rows)
        if count < self.fewest:
            times = -(-self.fewest // count)
            padded = [torch.cat([one] * times)[: self.fewest] for one in rows]
            return product(*padded)[:count]
        blocks = zip(*(torch.split(one, self.most) for one in rows), strict=True)
        return torch.cat([self.apply(product, *block) for block in blocks])


def find_row_bounds(product: RowwiseProduct, *example: torch.Tensor) -> RowBounds:
    """The bounds within which, in trials, a row's result is the same in every batch.

    Args:
        product: is tried with random rows.
        example: a row ``[1, ...]`` of each argument, for its shape, dtype and device.

    Raises:
        UnsupportedOptionError: there are none; the message names --batch-invariant.
    """
    generator = torch.Generator().manual_seed(_SEED)
    rows = [torch.randn(_MOST_ROWS, *one.shape[1:], generator=generator).to(one) for one in example]
    expected = product(*rows)
    differing = [
        count for count in _TRIED_ROWS if not _equal_in_blocks(count, product, rows, expected)
    ]
    for fewest in _FEWEST_ROWS:
        if all(count < fewest for count in differing):
            return RowBounds(fewest, _MOST_ROWS)
    for size in _BLOCK_SIZES:
        bounds = RowBounds(size, size)
        expected = bounds.apply(product, *rows)
        rolled = bounds.apply(product, *(one.roll(1, 0) for one in rows))
        if torch.equal(rolled.roll(-1, 0), expected):
            return bounds
    raise UnsupportedOptionError(
        "--batch-invariant: a product of this machine's torch depends on the rows beside a row"
    )


def _equal_in_blocks(
    count: int, product: RowwiseProduct, rows: list[torch.Tensor], expected: torch.Tensor
) -> bool:
    """Whether the product of some blocks of `count` rows is as `expected` of all of them."""
    starts = range(0, _MOST_ROWS - count + 1, count)[:_TRIED_BLOCKS]
    return all(
        torch.equal(product(*(one[a : a + count] for one in rows)), expected[a : a + count])
        for a in starts
    )
