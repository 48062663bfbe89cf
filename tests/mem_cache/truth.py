"""What the slots of a `Memory` should hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def truth_of(namespace: str, pool: int, tokens: Sequence[int]) -> np.ndarray:
    """In a pool, of a sequence of tokens: each a number made of all tokens up to its own."""
    chain, out = hash((namespace, pool)), np.empty(len(tokens), np.int64)
    for at, token in enumerate(tokens):
        chain = hash((chain, token))
        out[at] = chain
    return out
