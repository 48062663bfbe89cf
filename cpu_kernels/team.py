"""The running of kernels on torch's own threads: its OpenMP team.

A team's threads spin for milliseconds after a product, waiting for the next one. Other threads
would have to share cores with them, while the team itself begins at once. OpenMP's only interface
for that is a function of its runtime that compilers call. It is GCC's `GOMP_parallel` (LLVM's and
Intel's runtimes have it, too). torch's is found through the library that uses it. Without one,
threads are Python's.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_SYMBOL = "kvrelay_run_team"
_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BODY = ir.FunctionType(ir.VoidType(), [_INT8.as_pointer()])
_C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_C_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def find_gomp_parallel() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP that torch uses."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


@cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kernels")


@cache
def _warn_once(error: str) -> None:
    logger.warning("kernels have fewer threads than they should: %s", error)


@_C_RUN  # type: ignore[untyped-decorator]
def run_by_python(body: int, shared: int, threads: int, flags: int) -> None:
    """Do what `GOMP_parallel` does, with Python's threads. The caller alone can do all the work.

    An exception here would be lost. Once it returns, no thread uses the memory of `shared`.
    """
    call = _C_BODY(body)
    turns = [Future[None]() for _ in range(threads - 1)]
    try:
        for turn in turns:
            _helpers(threads - 1).submit(_take_turn, turn, call, shared)
    except Exception as error:  # no thread can be started; the turn may be queued all the same
        _warn_once(str(error))
    call(shared)
    for turn in turns:
        if not turn.cancel():
            turn.result()


def _take_turn(turn: Future[None], call: Callable[[int], None], shared: int) -> None:
    if turn.set_running_or_notify_cancel():
        call(shared)
        turn.set_result(None)


_RUN = find_gomp_parallel() or ctypes.cast(run_by_python, ctypes.c_void_p).value
# Kernels that are cached on disk refer to it by this name, too.
llvmlite.binding.add_symbol(_SYMBOL, _RUN)


def _make_body(context: Any, module: Any, result: Any, shared: Any) -> Any:
    """Make a function that calls the compiled `result` with the arguments that `shared` points to.

    ``shared {args, failed, ended}``: `failed` becomes 1 if the call raises, `ended` if it does not.
    """
    body = ir.Function(module, _BODY, module.get_unique_name("team_body"))
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block())
    pointer = builder.bitcast(body.args[0], shared.as_pointer())
    packed = builder.load(cgutils.gep_inbounds(builder, pointer, 0, 0))
    args = [builder.extract_value(packed, at) for at in range(len(packed.type.elements))]
    function = context.declare_function(module, result.fndesc)
    status, _ = context.call_conv.call_function(
        builder, function, result.fndesc.restype, result.fndesc.argtypes, args
    )
    with builder.if_else(status.is_error, likely=False) as (error, well):
        with error:
            builder.store(_INT32(1), cgutils.gep_inbounds(builder, pointer, 0, 1))
        with well:
            builder.store(_INT32(1), cgutils.gep_inbounds(builder, pointer, 0, 2))
    builder.ret_void()
    return body


@intrinsic  # type: ignore[untyped-decorator]
def run_on_team(typing: Any, threads: Any, function: Any, args: Any) -> Any:
    """Call the kernel `function` with the tuple `args` on `threads` threads, and wait for all.

    They divide the work by `take`. One thread is the caller's own, without a team. Raise
    `MemoryError` if a call raised, or if no thread has done the work.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = tuple(signature.args[2])
        called = function.get_call_type(typing, kinds, {})
        result = function.dispatcher.overloads[called.args]
        context.active_code_library.add_linking_library(result.library)
        shared = ir.LiteralStructType([values[2].type, _INT32, _INT32])
        place = cgutils.alloca_once(builder, shared)
        builder.store(values[2], cgutils.gep_inbounds(builder, place, 0, 0))
        failed, ended = (cgutils.gep_inbounds(builder, place, 0, at) for at in (1, 2))
        builder.store(_INT32(0), failed)
        builder.store(_INT32(0), ended)
        pointer = _INT8.as_pointer()
        run = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_BODY.as_pointer(), pointer, _INT32, _INT32]),
            _SYMBOL,
        )
        body = _make_body(context, builder.module, result, shared)
        count, data = builder.trunc(values[0], _INT32), builder.bitcast(place, pointer)
        with builder.if_else(builder.icmp_signed(">", count, _INT32(1))) as (several, one):
            with several:
                builder.call(run, [body, data, count, _INT32(0)])
            with one:
                builder.call(body, [data])
        bad = builder.icmp_unsigned(">=", builder.load(failed), builder.load(ended))
        with cgutils.if_unlikely(builder, bad):
            context.call_conv.return_user_exc(builder, MemoryError, ())
        return context.get_dummy_value()

    return numba.void(numba.int64, function, args), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(_typing: Any, counter: Any, count: Any) -> Any:
    """Return ``counter [1]`` int64 and raise it by `count`, atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, args[1], "monotonic")

    return numba.int64(counter, numba.int64), generate
