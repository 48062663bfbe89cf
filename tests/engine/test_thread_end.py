"""A worker's threads end in bounded time, whatever hangs, and soon enough for its supervisor."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvrelay.deploy.controller.supervision import supervisor
from kvrelay.device import thread_end
from kvrelay.device.thread_end import CLOSE_SECONDS, LEAST_SECONDS, close_all
from kvrelay.engine.executor.forward_thread import ForwardThread
from kvrelay.engine.executor.step import Executor, Step, StepEnded
from kvrelay.engine.worker.worker import STOP_GRACE_S

WAIT_S = 30.0


class Hanging:
    """A device whose copies hang until they may end, and then fail if they are told to."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def copy(self, copies: object) -> None:
        self.begun.put(1)
        assert self.may_end.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def launch(self, step: object) -> None:
        raise AssertionError("a forward that was given up is launched")

    def must_wait(self, step: object) -> bool:
        return False

    def wait(self) -> None:
        """Nothing else runs."""


class Given:
    """A forward thread with two steps, the first of which hangs."""

    def __init__(self) -> None:
        self.device = Hanging()
        self.ended: queue.SimpleQueue[StepEnded[Any]] = queue.SimpleQueue()
        self.failures: list[str] = []
        executor = cast("Executor", self.device)
        self.forward: ForwardThread[Any] = ForwardThread(
            executor, self.ended.put, self.failures.append
        )
        for number in (1, 2):
            self.forward.launch(Step(number, (), (), (cast("Any", object()),)))
        assert self.device.begun.get(timeout=WAIT_S)


@pytest.fixture
def given() -> Iterator[Given]:
    given = Given()
    yield given
    given.device.may_end.set()
    given.forward._thread.join(WAIT_S)
    assert not given.forward._thread.is_alive()


def test_the_kernel_knows_the_forward_thread_by_its_name(given: Given) -> None:
    """And so the threads of kernels that it starts, which have the name of their parent."""
    ours = [thread for thread in threading.enumerate() if thread.name == "forward"]
    for thread in ours:
        assert Path(f"/proc/self/task/{thread.native_id}/comm").read_text() == "forward\n"
    assert ours
    given.forward.close(0.0)  # its second step is never launched


def test_a_forward_that_hangs_is_given_up_at_the_end_with_those_behind_it(
    given: Given, caplog: pytest.LogCaptureFixture
):
    given.forward.close(0.1)
    assert "forwards have not ended for 0.1 s: 2 are given up" in caplog.text
    assert not given.forward.has_ended
    given.device.error = RuntimeError("injected")
    given.device.may_end.set()
    given.forward._thread.join(WAIT_S)
    assert given.forward.has_ended
    assert (given.device.begun.empty(), given.ended.empty(), given.failures) == (True, True, [])


class Noted:
    """Another thread, which says how long it was waited for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def close(self, seconds: float) -> None:
        self.seconds = seconds


def test_those_behind_a_thread_that_hangs_have_the_least_time(
    given: Given, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(thread_end, "CLOSE_SECONDS", 0.2)
    before, behind = Noted(), Noted()
    began = time.monotonic()
    close_all(before, given.forward, None, behind)
    assert time.monotonic() - began >= 0.2
    assert 0.1 < before.seconds <= 0.2
    assert behind.seconds == LEAST_SECONDS


def test_a_supervisor_waits_for_longer_than_the_end_takes():
    """The listeners' grace comes before the threads, of which six are closed."""
    assert STOP_GRACE_S + CLOSE_SECONDS + 6 * LEAST_SECONDS < supervisor._STOP_SECONDS - 1
