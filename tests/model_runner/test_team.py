"""Kernels on torch's team of threads: all take part of the work, and errors come back."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite.binding import add_symbol  # type: ignore[import-untyped]

from kvrelay.cpu_kernels import team
from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.team import run_on_team, take

COUNT = 10_000


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def mark(counter: Array, marks: Array) -> None:
    while True:
        index = take(counter, 1)
        if index >= len(marks):
            break
        marks[index] += 1


@numba.njit  # type: ignore[untyped-decorator]
def mark_together(threads: int, counter: Array, marks: Array) -> None:
    run_on_team(threads, mark, (counter, marks))


@numba.njit  # type: ignore[untyped-decorator]
def mark_by_python(counter: Array, marks: Array) -> None:
    run_on_team(3, mark, (counter, marks))


@numba.njit  # type: ignore[untyped-decorator]
def mark_by_nobody(counter: Array, marks: Array) -> None:
    run_on_team(3, mark, (counter, marks))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def fail_once(counter: Array) -> None:
    if take(counter, 1) == 0:
        raise ValueError


@numba.njit  # type: ignore[untyped-decorator]
def fail_together(threads: int, counter: Array) -> None:
    run_on_team(threads, fail_once, (counter,))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_piece_is_taken_once(threads: int) -> None:
    counter, marks = np.zeros(1, np.int64), np.zeros(COUNT, np.int64)
    mark_together(threads, counter, marks)
    assert (marks == 1).all()
    assert counter[0] == COUNT + threads  # each of them found that nothing was left


@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_that_raises_is_noticed(threads: int) -> None:
    counter = np.zeros(1, np.int64)
    with pytest.raises(MemoryError):
        fail_together(threads, counter)
    assert counter[0] == threads
    counter[0] = 1
    fail_together(threads, counter)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GCC's OpenMP on Linux")
def test_the_team_is_that_of_torch() -> None:
    assert team.find_gomp_parallel() is not None


def test_threads_of_python_where_there_is_no_team() -> None:
    together = threading.Barrier(3)
    got: list[int | None] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # type: ignore[untyped-decorator]
    def body(shared: int | None) -> None:
        together.wait(20)
        got.append(shared)

    address = ctypes.cast(body, ctypes.c_void_p).value
    assert address is not None
    team.run_by_python(address, 7, 3, 0)
    assert got == [7, 7, 7]


@contextmanager
def team_run_by(run: Any) -> Iterator[None]:
    """What kernels that are compiled meanwhile call in place of `GOMP_parallel`."""
    add_symbol(team._SYMBOL, ctypes.cast(run, ctypes.c_void_p).value)
    try:
        yield
    finally:
        add_symbol(team._SYMBOL, team._RUN)


class NoThreads:
    """Queues what is submitted although no thread can be started, as the executor does."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., None], *args: object) -> None:
        self.queued.append(partial(function, *args))
        raise RuntimeError("can't start new thread")


def test_the_caller_does_all_the_work_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = NoThreads()
    monkeypatch.setattr(team, "_helpers", lambda count: threads)
    counter, marks = np.zeros(1, np.int64), np.zeros(COUNT, np.int64)
    with team_run_by(team.run_by_python):
        mark_by_python(counter, marks)
    assert (marks == 1).all()
    assert "can't start new thread" in caplog.text
    counter[0] = 0
    for late in threads.queued:
        late()
    assert counter[0] == 0, "what the call used is gone by now"


def test_work_that_nobody_does_is_noticed() -> None:
    @team._C_RUN  # type: ignore[untyped-decorator]
    def do_nothing(*_: int) -> None:
        pass

    with team_run_by(do_nothing), pytest.raises(MemoryError):
        mark_by_nobody(np.zeros(1, np.int64), np.zeros(COUNT, np.int64))
