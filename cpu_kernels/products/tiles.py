"""Matrix products by tiles of bfloat16 that the processor multiplies as a whole: AMX.

A tile has up to 16 rows of 64 bytes. The one instruction that multiplies is

    C [M, 16] += A [M, 32] B [32, 16]

of float32 sums, rows of bfloat16, and pairs of bfloat16: ``B`` has 16 rows of ``[16, 2]``. This is
the layout of weights in `product`, and of queries and weights of values in `prefill_attention`. The
instruction adds its 32 products in its own order, the same for every row. So a row's result depends
on no other row. Denormal numbers count as 0.

A process asks the system before it uses tiles (`may_use_tiles`). A thread sets the number of rows
of its tiles (`shape_tiles`) before it multiplies, and gives them up afterwards (`drop_tiles`).
Otherwise the system saves 8 KiB at each switch of threads. Code for tiles is compiled wherever the
processor has them, even if this process may not use them: compiled kernels are kept by processor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.cpu_kernels.lanes import ask_for_line, call, loop
from kvrelay.cpu_kernels.pair_memory import pointer
from kvrelay.cpu_kernels.processor import has_tiles

logger = logging.getLogger(__name__)

TILE_ROWS: Final = 16
TILE_NUMBERS: Final = 32
"""The bfloat16 numbers in a tile's row."""
TILE_BYTES: Final = 64
"""The bytes of a tile's row, and of a cache line."""
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18
"""The x86-64 system call, its request for a part of the processor's state, and that part."""

INT8, INT16, INT64 = (ir.IntType(bits) for bits in (8, 16, 64))


@cache
def may_use_tiles() -> bool:
    """Whether the processor has tiles, and the system lets this process use them."""
    if not has_tiles() or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0:
        return True
    error = os.strerror(ctypes.get_errno())
    logger.warning("the system does not let this process use AMX, so it is slower: %s", error)
    return False


def emit_tiles(generate: Callable[..., None]) -> Callable[..., Any]:
    """Emit code where the processor has tiles; elsewhere it is never reached."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if has_tiles():
            generate(builder, *args)
        return context.get_dummy_value()

    return emit


def tile_call(builder: Any, name: str, *args: Any) -> None:
    """Emit an instruction of AMX; Python's numbers are tiles."""
    values = [INT8(arg) if isinstance(arg, int) else arg for arg in args]
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *values)


def load_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Fill a tile with the rows from `address` on, `stride` bytes apart."""
    tile_call(builder, "tileloadd64", tile, pointer(builder, address, INT8), stride)


def store_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Write a tile's rows from `address` on, `stride` bytes apart."""
    tile_call(builder, "tilestored64", tile, pointer(builder, address, INT8), stride)


def ask_for_lines(
    builder: Any,
    begin: Any,
    stride: Any,
    lines: Any,
    *,
    to_write: bool = False,
    second_cache: bool = False,
) -> None:
    """Fetch `lines` cache lines from the address `begin` on, `stride` bytes apart."""

    def ask(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        place = pointer(builder, builder.add(begin, builder.mul(index, stride)), INT8)
        ask_for_line(builder, place, to_write=to_write, second_cache=second_cache)
        return ()

    loop(builder, lines, (), ask)


def on(builder: Any, address: Any, bytes_on: int) -> Any:
    """The address `bytes_on` bytes further on."""
    return builder.add(address, INT64(bytes_on))


@intrinsic  # type: ignore[untyped-decorator]
def shape_tiles(_typing: Any, first: Any, second: Any) -> Any:
    """Give this thread tiles: 0, 1 and 4 of `first` rows, 2, 3 and 5 of `second`, others of 16.

    `first` and `second` are 1 to 16.
    """

    def generate(builder: Any, *rows: Any) -> None:
        first, second = (builder.trunc(count, INT8) for count in rows)
        room = cgutils.alloca_once(builder, ir.ArrayType(INT8, 64))
        begin = builder.bitcast(room, INT8.as_pointer())
        cgutils.memset(builder, begin, INT64(64), 0)

        def write(at: int, value: Any) -> None:
            place = builder.gep(begin, [INT64(at)])
            builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)

        write(0, INT8(1))  # the palette
        whole = INT8(TILE_ROWS)
        for tile, count in enumerate((first, first, second, second, first, second, whole, whole)):
            write(16 + 2 * tile, INT16(TILE_BYTES))
            write(48 + tile, count)
        tile_call(builder, "ldtilecfg", begin)

    return numba.void(numba.int64, numba.int64), emit_tiles(generate)


@intrinsic  # type: ignore[untyped-decorator]
def drop_tiles(_typing: Any) -> Any:
    """Give up this thread's tiles."""
    return numba.void(), emit_tiles(lambda builder: tile_call(builder, "tilerelease"))
