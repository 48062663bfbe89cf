"""The end of top-p's nucleus (Holtzman and others, arXiv 1904.09751), found without sorting."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import inlined, kernel

_ABOVE_ONE = 0x3F800001
"""The bits of the float32 that follows 1; the bits of floats from 0 on ascend with them."""


@inlined
def _sum_from(weights: Array, least: Any) -> Any:
    """The float64 sum of the weights that are at least `least`."""
    total = 0.0
    for i in range(len(weights)):
        total += np.float64(weights[i]) if weights[i] >= least else 0.0
    return total


@inlined
def _as_float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@kernel
def find_nucleus(weights: Array, top_p: float) -> tuple[float, int]:
    """The least weight of the nucleus, and the number of weights equal to it that belong to it.

    The nucleus is the fewest largest of ``weights [n]`` (float32, in [0, 1]) whose sum reaches
    `top_p` of the sum of all. Its least weight is found by bisecting the bits of floats: each of 30
    steps is one vectorized sum.
    """
    target = top_p * _sum_from(weights, np.float32(0.0))
    low, high = np.uint32(0), np.uint32(_ABOVE_ONE)
    while high - low > np.uint32(1):
        middle = np.uint32((low + high) >> np.uint32(1))
        if _sum_from(weights, _as_float(middle)) >= target:
            low = middle
        else:
            high = middle
    least = _as_float(low)
    missing = target - _sum_from(weights, _as_float(high))
    equals = int(np.ceil(missing / np.float64(least))) if least > 0 else 1
    return least, max(equals, 1)
