"""Common parts of compiled CPU kernels: decorators, arrays at addresses, floats, exp, prefetch.

numba has neither bfloat16 nor, on a CPU, float16. Kernels see bfloat16's bits as uint16, the upper
half of a float32, and float16's bits as int16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic, overload

from kvrelay.cpu_kernels.kernel_cache import is_kernel_source, kernel_cache, share_compilation
from kvrelay.cpu_kernels.lanes import add_scaled, ask_for_line

P = ParamSpec("P")
R = TypeVar("R")

_REASSOCIATE = {"reassoc", "contract", "nsz", "arcp"}
"""The flags that let sums be vectorized, without "nnan": the sampler must see NaN to refuse it."""


class PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The code of a part of kernels: linked into theirs, neither optimized nor run by itself.

    numba would make machine code of each function that is called, and again of its callers, which
    contain it: of a kernel of ten parts that took twice as long as the rest of its compilation.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        """Return 0: there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Self:
        """The receiver of the environment, of which machine code would have the address."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Leave out the environment: a part has no Python objects."""


class PartCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler, making a `PartLibrary`."""

    def define_pipelines(self) -> Any:
        """The passes, which are numba's."""
        state = self.state
        state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


def _compile(function: Callable[P, R], cached: bool, **options: Any) -> Any:
    source = Path(function.__code__.co_filename)
    assert is_kernel_source(source), f"{source}: a kernel outside of cpu_kernels/ has a stale cache"
    # Divisions as in numpy: Python's check for zero keeps a loop from being vectorized.
    return numba.njit(cache=cached, nogil=True, error_model="numpy", **options)(function)


def _compile_part(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher = _compile(function, False, pipeline_class=PartCompiler, **wrappers, **options)
    return cast("Callable[P, R]", dispatcher)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile on first use, cache on disk, run without the GIL; sums may be reordered."""
    with kernel_cache() as cached:
        dispatcher = _compile(function, cached, fastmath=_REASSOCIATE)
        if cached and dispatcher is not function:  # as it is under NUMBA_DISABLE_JIT
            share_compilation(dispatcher)
        return cast("Callable[P, R]", dispatcher)


def team_part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile the part of a kernel that `run_on_team` runs on each thread into that kernel."""
    return _compile_part(function, fastmath=_REASSOCIATE)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a part of kernels into its callers, whose constants are then constants in it, too."""
    return _compile_part(function, fastmath=_REASSOCIATE, forceinline=True)


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Like `inlined`, with floating point operations in the order they are written."""
    # False must be said: else a function has the options of the kernel that it is compiled for.
    return _compile_part(function, fastmath=False, forceinline=True)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer_to(_typing: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return numba.types.voidptr(numba.int64), generate


@inlined
def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """The array whose elements begin at an `address`, in C's order; inside kernels.

    The array does not keep the memory alive.
    """
    return numba.carray(_pointer_to(address), shape, dtype)


def widen(bits: Any) -> Any:
    """A stored element as float32, inside kernels: from bits, or a float32 itself."""
    raise NotImplementedError("only inside a kernel")


@intrinsic  # type: ignore[untyped-decorator]
def _widen_float16(_typing: Any, bits: Any) -> Any:
    """The float32 of a float16's bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.float32(numba.int16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _round_to_float16(_typing: Any, value: Any) -> Any:
    """The bits of the float16 that is nearest to a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return numba.int16(numba.float32), generate


@overload(widen)  # type: ignore[untyped-decorator]
def _widen(bits: Any) -> Any:
    def widen_bits(bits: Any) -> Any:
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    def widen_half(bits: Any) -> Any:
        return _widen_float16(bits)

    def widen_float(bits: Any) -> Any:
        return bits

    return {numba.uint16: widen_bits, numba.int16: widen_half}.get(bits, widen_float)


def store(array: Any, index: Any, value: Any) -> None:
    """Write a float32 to a row of bits or float32, inside kernels."""
    raise NotImplementedError("only inside a kernel")


@overload(store)  # type: ignore[untyped-decorator]
def _store(array: Any, index: Any, value: Any) -> Any:
    def store_bits(array: Any, index: Any, value: Any) -> None:
        array[index] = round_to_bfloat16(value)

    def store_half(array: Any, index: Any, value: Any) -> None:
        array[index] = _round_to_float16(value)

    def store_float(array: Any, index: Any, value: Any) -> None:
        array[index] = value

    return {numba.uint16: store_bits, numba.int16: store_half}.get(array.dtype, store_float)


@exact
def round_to_bfloat16(value: Any) -> Any:
    """Round to nearest, ties to even. (A NaN of all ones would overflow; none arises.)"""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@intrinsic  # type: ignore[untyped-decorator]
def add_scaled_float(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` of float32, rounded once, also in `exact` functions."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return add_scaled(builder, *args)

    return numba.float32(numba.float32, numba.float32, numba.float32), generate


@exact
def exp_of_negative(x: Any) -> Any:
    """``exp(x)`` of a float32 ``x <= 0`` to about 1e-7, 0 below -87; NaN stays NaN.

    Range reduction by Cody and Waite and a Taylor polynomial: unlike libm's
    `expf`, a loop of it is vectorized.
    """
    n = np.int32(max(x, np.float32(-87.0)) * np.float32(1.44269504) - np.float32(0.5))
    r = add_scaled_float(np.float32(n), np.float32(-0.693359375), x)
    r = add_scaled_float(np.float32(n), np.float32(2.12194440e-4), r)
    p = np.float32(1 / 5040)
    p = add_scaled_float(p, r, np.float32(1 / 720))
    p = add_scaled_float(p, r, np.float32(1 / 120))
    p = add_scaled_float(p, r, np.float32(1 / 24))
    p = add_scaled_float(p, r, np.float32(1 / 6))
    p = add_scaled_float(p, r, np.float32(0.5))
    p = add_scaled_float(p, r, np.float32(1.0))
    p = add_scaled_float(p, r, np.float32(1.0))
    power = p * np.uint32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.0) else power


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Fetch ``array[index]`` (1-D, contiguous) into the second cache; any index will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        ask_for_line(builder, builder.gep(data, [args[1]]), second_cache=True)
        return context.get_dummy_value()

    return numba.void(array, index), generate
