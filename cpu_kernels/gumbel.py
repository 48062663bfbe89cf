"""The noise of Gumbel-max sampling, from a counter: the same number on every machine.

Each token id gets a Gumbel-distributed noise (Gumbel 1954; "the exponential race"). The token with
the largest ``logit + noise`` is then a draw from ``softmax(logits)``. A rounding error of a logit
changes the outcome only where the two best nearly tie. In a cumulated sum, an error would move the
boundaries of all tokens after it.

The noise comes from Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2,
3", SC 2011). Its output is a pure function of a counter and a key::

    key      seed, 64 bits
    counter  (block, position, choice, 0), 32 bits each
    output   four words; in 64 consecutive token ids, word w of the 16 blocks are
             those of the 16 ids from 16 * w on, so that a loop over ids is vectorized
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import add_scaled_float, exact, kernel

_BLOCKS = 16
WORDS_MULTIPLE = 4 * _BLOCKS
"""Words are made for this many token ids at a time, those of `_BLOCKS` neighbouring blocks."""


@exact
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return the four 32-bit words after ten rounds."""
    for _ in range(10):
        p0 = np.uint64(c0) * np.uint64(0xD2511F53)
        p1 = np.uint64(c2) * np.uint64(0xCD9E8D57)
        high0, high1 = np.uint32(p0 >> np.uint64(32)), np.uint32(p1 >> np.uint64(32))
        c0, c1, c2, c3 = (
            np.uint32(high1 ^ c1 ^ k0),
            np.uint32(p1),
            np.uint32(high0 ^ c3 ^ k1),
            np.uint32(p0),
        )
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@kernel
def random_words(seed: Any, choice: Any, position: Any, out: Array) -> None:
    """Write a 32-bit word for each token id into ``out [n]`` uint32; `n` is a multiple of 64."""
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> np.uint64(32))
    for group in range(len(out) // WORDS_MULTIPLE):
        first_block, start = np.uint32(group * _BLOCKS), group * WORDS_MULTIPLE
        for i in range(_BLOCKS):
            block = np.uint32(first_block + np.uint32(i))
            a, b, c, d = _philox(
                block, np.uint32(position), np.uint32(choice), np.uint32(0), k0, k1
            )
            out[start + i] = a
            out[start + _BLOCKS + i] = b
            out[start + 2 * _BLOCKS + i] = c
            out[start + 3 * _BLOCKS + i] = d


@exact
def _log(x: Any) -> Any:
    """``log(x)`` of a positive, normal float32 to about 1e-7 (Cephes' logf), vectorizable."""
    bits = np.float32(x).view(np.uint32)
    exponent = np.int32(np.uint32(bits - np.uint32(0x3F3504F3))) >> np.int32(23)
    mantissa = np.uint32(bits - np.uint32(np.uint32(exponent) << np.uint32(23))).view(np.float32)
    f = mantissa - np.float32(1.0)
    p = np.float32(7.0376836292e-2)
    p = add_scaled_float(p, f, np.float32(-1.1514610310e-1))
    p = add_scaled_float(p, f, np.float32(1.1676998740e-1))
    p = add_scaled_float(p, f, np.float32(-1.2420140846e-1))
    p = add_scaled_float(p, f, np.float32(1.4249322787e-1))
    p = add_scaled_float(p, f, np.float32(-1.6668057665e-1))
    p = add_scaled_float(p, f, np.float32(2.0000714765e-1))
    p = add_scaled_float(p, f, np.float32(-2.4999993993e-1))
    p = add_scaled_float(p, f, np.float32(3.3333331174e-1))
    square = f * f
    rest = add_scaled_float(f * square, p, np.float32(-0.5) * square)
    return add_scaled_float(np.float32(exponent), np.float32(0.693147181), f + rest)


@exact
def _gumbel(word: Any) -> Any:
    """``-log(-log(1 - v))`` for the number ``v`` in (0, 1) that `word` stands for.

    The token that wins nearly always has a small ``v``, so a small ``v`` keeps its precision:
    ``-log(1 - v)`` is computed by its series there.
    """
    v = (np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)
    series = add_scaled_float(v, np.float32(0.33333334), np.float32(0.5))
    exponential = v * add_scaled_float(v, series, np.float32(1.0))
    if v >= np.float32(0.01):
        exponential = -_log(max(np.float32(1.0) - v, np.float32(2.0**-25)))
    return -_log(exponential)


@exact
def _add_noise(logits: Array, largest: Any, temperature: Any, words: Array, out: Array) -> None:
    """`add_noise`: the same bits wherever its arrays lie, near each other or not."""
    for i in range(len(logits)):
        out[i] = (logits[i] - largest) / temperature + _gumbel(words[i])


@kernel
def add_noise(logits: Array, largest: Any, temperature: Any, words: Array, out: Array) -> None:
    """Add noise to scaled logits: ``out = (logits - largest) / temperature + noise(words)``.

    Arrays are ``[n]``; `largest` only keeps the numbers small. A logit of -inf stays so.
    """
    _add_noise(logits, largest, temperature, words, out)
