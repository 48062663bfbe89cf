"""Products with weights of 4 bits on a CPU: a panel becomes bfloat16 where it is multiplied.

Weights lie in panels as in `product`, an octet for each pair of inputs, the first one low::

    codes  [panels, K / 2, PANEL] uint8
    scales [panels, groups, PANEL] float32
    zeros  [panels, groups, PANEL] uint8

A weight is ``(code - zero) * scale``, rounded once. A thread writes a panel into memory of its own,
which stays in a second cache, and multiplies with it as `product` does. So results are the bits of
a product with the same weights in bfloat16, while a quarter of the bytes comes from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import inlined, kernel, team_part
from kvrelay.cpu_kernels.lanes import (
    BFLOATS,
    FLOATS,
    INTS,
    LANES,
    LINE_BYTES,
    add_scaled,
    ask_for_line,
    call,
    constant,
    loop,
    multiply,
    subtract,
    times,
)
from kvrelay.cpu_kernels.pair_memory import BITS, address_of, make_lines, pointer
from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.cpu_kernels.products.product import (
    PANEL,
    SUM_ROWS,
    Product,
    Unit,
    find_block,
    find_share,
    multiply_panel,
)
from kvrelay.cpu_kernels.products.product_floats import PANEL_BYTES
from kvrelay.cpu_kernels.products.tiles import drop_tiles
from kvrelay.cpu_kernels.team import run_on_team, take

_STEP: Final = 2
"""The pairs of inputs in a turn of the loop: their octets fill a cache line."""
_AHEAD: Final = 4096
"""The bytes fetched ahead of the octets that become bfloat16."""
_INT8, _INT64 = ir.IntType(8), ir.IntType(64)
_OCTETS = ir.VectorType(_INT8, LANES)
_INTERLEAVED: Final = [lane // 2 + lane % 2 * LANES for lane in range(2 * LANES)]


class Nibbles(NamedTuple):
    """The addresses of weights in 4 bits, and the number of their groups of inputs."""

    codes: int
    scales: int
    zeros: int
    groups: int


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _rounded_pairs(builder: Any, first: Any, second: Any) -> Any:
    """The bfloat16 of two vectors, lane by lane side by side; both are finite."""
    if has_bfloat16_products():
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        both = builder.bitcast(call(builder, name, BFLOATS, second, first), BITS)
        kind = ir.VectorType(ir.IntType(32), 2 * LANES)
        return builder.shuffle_vector(both, both, ir.Constant(kind, _INTERLEAVED))
    low, high = (_round(builder, one) for one in (first, second))
    upper = builder.and_(high, _ints(-1 << 16))
    return builder.bitcast(builder.or_(builder.lshr(low, _ints(16)), upper), BITS)


def _round(builder: Any, total: Any) -> Any:
    """The bits of float32, rounded to bfloat16 in their upper half, ties to even."""
    bits = builder.bitcast(total, INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    return builder.add(builder.add(bits, _ints(0x7FFF)), odd)


@intrinsic  # type: ignore[untyped-decorator]
def _widen_group(
    _typing: Any, codes: Any, scales: Any, zeros: Any, pairs: Any, target: Any
) -> Any:
    """Write `pairs` of a group's weights ``[pairs, PANEL, 2]`` as bfloat16 to `target`.

    All but `pairs` are addresses, of the group's first pair.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes, scales, zeros, pairs, target = args
        sides = []
        for side in range(PANEL // LANES):
            scale = builder.load(pointer(builder, scales, FLOATS, side * LINE_BYTES), align=4)
            zero = builder.load(pointer(builder, zeros, _OCTETS, side * LANES), align=1)
            wide = builder.sitofp(builder.zext(zero, INTS), FLOATS)
            # Exact: a scale has 11 bits, a zero 4.
            sides.append((scale, subtract(builder, constant(0.0), multiply(builder, wide, scale))))

        def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
            octets = builder.add(codes, times(builder, index, _STEP * PANEL))
            ask_for_line(builder, pointer(builder, octets, _INT8, _AHEAD))
            panel = builder.add(target, times(builder, index, _STEP * PANEL_BYTES))
            for step in range(_STEP):
                for side, (scale, offset) in enumerate(sides):
                    place = step * PANEL + side * LANES
                    both = builder.zext(
                        builder.load(pointer(builder, octets, _OCTETS, place), align=1), INTS
                    )
                    first, second = (
                        add_scaled(builder, builder.sitofp(one, FLOATS), scale, offset)
                        for one in (
                            builder.and_(both, _ints(15)),
                            builder.lshr(both, _ints(4)),
                        )
                    )
                    to = pointer(builder, panel, BITS, step * PANEL_BYTES + side * LINE_BYTES)
                    builder.store(_rounded_pairs(builder, first, second), to, align=2)
            return ()

        loop(builder, builder.udiv(pairs, _INT64(_STEP)), (), turn)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 5), generate


@inlined
def widen_panel(nibbles: Nibbles, pairs: int, panel: int, target: int) -> None:
    """Write the weights of a panel as bfloat16 ``[pairs, PANEL, 2]`` to the address `target`."""
    each = pairs // nibbles.groups
    for group in range(nibbles.groups):
        place = panel * nibbles.groups + group
        _widen_group(
            nibbles.codes + place * each * PANEL,
            nibbles.scales + place * PANEL * 4,
            nibbles.zeros + place * PANEL,
            each,
            target + group * each * PANEL_BYTES,
        )


@kernel
def multiply_nibbles(
    threads: int,
    unit: int,
    x: int,
    codes: int,
    scales: int,
    zeros: int,
    groups: int,
    bias: int,
    residual: int,
    out: int,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    """Compute as `multiply` does, of weights in 4 bits.

    A group is a number of inputs that `PAIRS` divides.
    """
    block = find_block(unit, rows, inputs)
    units = (rows + block - 1) // block * ((outputs + PANEL - 1) // PANEL)
    share = find_share(threads, unit, rows, units)
    product = Product(x, 0, bias, residual, out, rows, inputs // 2, outputs, block, unit)
    nibbles = Nibbles(codes, scales, zeros, groups)
    args = (np.zeros(1, np.int64), share, units, product, nibbles)
    run_on_team(threads, multiply_remaining_nibbles, args)


@team_part
def multiply_remaining_nibbles(
    counter: Array, share: int, units: int, product: Product, nibbles: Nibbles
) -> None:
    """Compute the next `share` of `units` until none is left; a unit is a panel of a block."""
    panels = (product.outputs + PANEL - 1) // PANEL
    sums = make_lines(SUM_ROWS, PANEL, np.float32)
    weights = make_lines(product.pairs, PANEL, np.uint32)
    widened_rows = min(product.block, product.rows) if product.unit == Unit.FLOATS else 0
    widened = make_lines(widened_rows, 2 * product.pairs, np.float32)
    widened_from = -1
    begin = take(counter, share)
    while begin < units:
        for unit in range(begin, min(begin + share, units)):
            first, panel = unit // panels * product.block, unit % panels
            widen_panel(nibbles, product.pairs, panel, address_of(weights))
            # Where this panel would be, were all of them bfloat16.
            begin_at = address_of(weights) - panel * product.pairs * PANEL_BYTES
            one = Product(
                product.x,
                begin_at,
                product.bias,
                product.residual,
                product.out,
                product.rows,
                product.pairs,
                product.outputs,
                product.block,
                product.unit,
            )
            is_widened, widened_from = first == widened_from, first
            multiply_panel(one, first, panel, panel, is_widened, widened, sums)
        begin = take(counter, share)
    if product.unit == Unit.TILES:
        drop_tiles()
