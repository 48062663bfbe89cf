"""The widening of 8-bit pages by a table of all 256 numbers, compiled for a CPU."""

from __future__ import annotations

import numpy as np

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import kernel, team_part
from kvrelay.cpu_kernels.team import run_on_team, take


@kernel
def dequantize_pages(
    threads: int,
    pages: Array,
    layer_start: int,
    page_stride: int,
    page_ids: Array,
    tables: Array,
    out: Array,
) -> None:
    """Write ``tables[part, pages[...]]`` to ``out [n, parts, numbers]``.

    `pages` is a pool's flat memory as bytes; ``tables [parts, 256]`` and `out` have one dtype.
    """
    args = (np.zeros(1, np.int64), pages, layer_start, page_stride, page_ids, tables, out)
    run_on_team(threads, dequantize_some, args)


@team_part
def dequantize_some(
    counter: Array,
    pages: Array,
    layer_start: int,
    page_stride: int,
    page_ids: Array,
    tables: Array,
    out: Array,
) -> None:
    """Write pages of `dequantize_pages` until none is left."""
    index = take(counter, 1)
    numbers = out.shape[2]
    while index < len(page_ids):
        start = layer_start + page_ids[index] * page_stride
        for part in range(out.shape[1]):
            source = pages[start + part * numbers : start + (part + 1) * numbers]
            target, table = out[index, part], tables[part]
            for i in range(numbers):
                target[i] = table[source[i]]
        index = take(counter, 1)
