"""The reading of keys and values from pages for prefill attention, in the units that it multiplies.

A unit (`lanes.add_product`) is two bfloat16, or one float32. A row of keys is one token's; a row of
values has `k` tokens, as many as a unit has numbers. Keys are read from pages where they are units
there. Other keys, and all values, are copied, a block at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import inlined, widen
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.pair_memory import address_of, pair_values

BLOCK = 128
"""The tokens whose scores are computed before they are weighed: they stay in the first cache."""
WORD = 4
"""The bytes of a unit, of a float32 and of an int32."""


class PrefillHeads(NamedTuple):
    """A layer's pages, the layout of heads in them, and how they are weighed."""

    pages: Array
    units: Array
    """The pages as `view_units` returns them."""
    unit: Any
    """A number of the type of `units`."""
    length: int
    """The units of a head."""
    shift: int
    """The binary logarithm of the numbers in a unit."""
    layer_start: int
    page_stride: int
    page_size: int
    value_offset: int
    """The elements from a key to its value: 0 for a latent, which is both."""
    item: int
    """The bytes of an element."""
    token: int
    """The bytes of a key."""
    in_tiles: bool
    """Whether the processor's tiles multiply, not its vectors: heads are then whole tiles."""
    in_place: bool
    """Whether keys are read from pages, not copied: 8 units there, or 16 (tiles), in a row."""
    head_dim: int
    value_dim: int
    group: int
    """The query heads that share a head of keys and values."""
    window: int
    scale: Any
    softcap: Any
    """The softcap; 0: there is none."""
    sinks: int
    """The address of ``[num_heads]`` float32; 0: there are none."""


def view_units(numbers: Any, unit: Any) -> Any:
    """View an array of elements as an array for `to_unit`, without a copy; inside kernels."""
    raise NotImplementedError("only inside a kernel")


@overload(view_units)  # type: ignore[untyped-decorator]
def _view_units(numbers: Any, unit: Any) -> Any:
    def view_numbers(numbers: Any, unit: Any) -> Any:
        return numbers

    def view_pairs(numbers: Any, unit: Any) -> Any:
        return numbers.view(np.uint32)

    return view_pairs if unit.dtype == numba.uint32 else view_numbers


def to_unit(number: Any) -> Any:
    """The unit made of an element, or of a pair of bfloat16; inside kernels."""
    raise NotImplementedError("only inside a kernel")


@overload(to_unit)  # type: ignore[untyped-decorator]
def _to_unit(number: Any) -> Any:
    def keep(number: Any) -> Any:
        return number

    def make_float(number: Any) -> Any:
        return widen(number)

    return keep if number == numba.uint32 else make_float


def pack_value(numbers: Any, token: Any, values: Any) -> None:
    """Copy a token's ``numbers [n]`` into its row of ``values [block / k, width]``.

    Called inside kernels. A row of pairs has two tokens, the even one first.
    """
    raise NotImplementedError("only inside a kernel")


@overload(pack_value)  # type: ignore[untyped-decorator]
def _pack_value(numbers: Any, token: Any, values: Any) -> Any:
    def pack_floats(numbers: Any, token: Any, values: Any) -> None:
        row = values[token]
        for i in range(len(numbers)):
            row[i] = widen(numbers[i])

    def pack_pairs(numbers: Any, token: Any, values: Any) -> None:
        row = values[token // 2]
        if token % 2:
            for i in range(len(numbers)):
                row[i] |= np.uint32(np.uint32(numbers[i]) << np.uint32(16))
        else:
            for i in range(len(numbers)):
                row[i] = np.uint32(numbers[i])

    return pack_pairs if values.dtype == numba.uint32 else pack_floats


def pack_together(heads: Any, at: Any, count: Any, token: Any, values: Any) -> Any:
    """Copy up to `count` neighbouring values of a page at once; return how many.

    Called inside kernels. Returns 0 if that is not possible here, and for units that are no pairs.
    """
    raise NotImplementedError("only inside a kernel")


@overload(pack_together)  # type: ignore[untyped-decorator]
def _pack_together(heads: Any, at: Any, count: Any, token: Any, values: Any) -> Any:
    def pack_none(heads: Any, at: Any, count: Any, token: Any, values: Any) -> Any:
        return 0

    def pack_in_pairs(heads: Any, at: Any, count: Any, token: Any, values: Any) -> Any:
        pairs, width = count // 2, values.shape[1]
        if pairs == 0 or token % 2 == 1 or heads.value_dim % LANES:
            return 0
        source = address_of(heads.pages) + at * heads.item
        to = address_of(values) + token // 2 * width * WORD
        pair_values(source, heads.head_dim, pairs, to, width, heads.value_dim)
        return 2 * pairs

    return pack_in_pairs if values.dtype == numba.uint32 else pack_none


@inlined
def pack(numbers: Array, units: Array) -> None:
    """Copy a head's ``numbers [n]``, viewed by `view_units`, into ``units [n]``."""
    for i in range(len(numbers)):
        units[i] = to_unit(numbers[i])


@inlined
def copy_keys(
    heads: PrefillHeads,
    head: int,
    page_ids: Array,
    begin: int,
    skipped: int,
    seen: int,
    keys: Array,
) -> None:
    """Copy a head's keys ``begin + [skipped, seen)`` of a sequence into ``[skipped, seen)``."""
    for token in range(skipped, seen):
        at = find_element(heads, head, page_ids, begin + token) >> heads.shift
        pack(heads.units[at : at + heads.length], keys[token])


@inlined
def copy_values(
    heads: PrefillHeads,
    head: int,
    page_ids: Array,
    begin: int,
    skipped: int,
    seen: int,
    values: Array,
) -> None:
    """Copy a head's values ``begin + [skipped, seen)`` of a sequence into ``[skipped, seen)``.

    Other rows become zero, so that they add nothing with a weight of 0.
    """
    if seen - skipped < BLOCK:
        values[:] = 0
    token = skipped
    while token < seen:
        at = find_element(heads, head, page_ids, begin + token) + heads.value_offset
        left = heads.page_size - (begin + token) % heads.page_size
        together = pack_together(heads, at, min(left, seen - token), token, values)
        if together == 0:
            pack_value(heads.pages[at : at + heads.value_dim], token, values)
            together = 1
        token += together


@inlined
def find_element(heads: PrefillHeads, head: int, page_ids: Array, token: int) -> int:
    """The index of a sequence's key in its layer's pages."""
    page, slot = token // heads.page_size, token % heads.page_size
    start: int = heads.layer_start + page_ids[page] * heads.page_stride
    return start + (head * heads.page_size + slot) * heads.head_dim
