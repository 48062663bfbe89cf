"""The thread that copies between device and host: each copy ends once, whatever happens to it."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.device import thread_end
from kvrelay.device.device_streams import Streams
from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor import copy_thread
from kvrelay.engine.executor.copy_thread import CopyThread
from kvrelay.engine.worker.assembly import Assembly
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.host.tier_copies import CopyEnded, PageMoves
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.worker_info import WorkerRole
from tests.late_device import LateStreams
from tests.mem_cache.pinning_double import LimitedPinning

WAIT_S = 30.0
GEOMETRY = KVGeometry(2, 1, 8, torch.float32, page_size=4, order=PageOrder.LAYER_FIRST)


class Copies:
    """A copy thread between a device of six pages, each filled with its number, and a host."""

    def __init__(self, streams: Streams | None = None) -> None:
        cpu, host = torch.device("cpu"), replace(GEOMETRY, order=PageOrder.PAGE_FIRST)
        self.device, self.host = KVPool(GEOMETRY, 6, cpu), KVPool(host, 6, cpu)
        for layer in range(2):
            for page in range(6):
                self.device.layer(layer)[page] = page
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.thread = CopyThread([self.device], [self.host], self.ended.put, streams)

    def to_host(self, number: int, device_page: int, host_page: int) -> None:
        pages = np.array([device_page], np.int32), np.array([host_page], np.int32)
        self.thread.start(PageMoves(number, True, pages[:1], pages[1:]))

    def host_page(self, page: int) -> set[float]:
        return {x for layer in range(2) for x in self.host.layer(layer)[page].flatten().tolist()}


def test_a_copy_that_fails_is_told_and_those_behind_it_are_made():
    copies = Copies()
    copies.to_host(1, 6, 0)  # there is no such page
    copies.to_host(2, 5, 3)
    copies.thread.close()
    assert copies.thread.has_ended
    failed, made = copies.ended.get(timeout=WAIT_S), copies.ended.get(timeout=WAIT_S)
    assert (failed.operation, made.operation, made.error) == (1, 2, "")
    assert failed.error.startswith("ValueError: ")
    assert (copies.host_page(0), copies.host_page(3)) == ({0.0}, {5.0})
    assert copies.ended.empty()
    assert copies.thread.work.oldest is None


def test_a_copy_is_told_when_the_device_has_made_it():
    device = LateStreams(random.Random(0))
    copies = Copies(device)
    for number in range(1, 6):
        copies.to_host(number, number, number - 1)
        assert copies.ended.get(timeout=WAIT_S).operation == number
        assert copies.host_page(number - 1) == {float(number)}
    copies.thread.close()
    assert device.entered == {"copies"}


def test_a_device_that_the_thread_cannot_use_is_told_with_each_copy(
    monkeypatch: pytest.MonkeyPatch,
):
    def fail() -> None:
        raise RuntimeError("CUDA error: injected")

    device = LateStreams(random.Random(0))
    monkeypatch.setattr(device, "enter_thread", fail)
    copies = Copies(device)
    for number in (1, 2):
        copies.to_host(number, 1, 1)
        assert copies.ended.get(timeout=WAIT_S).error == "RuntimeError: CUDA error: injected"
    copies.thread.close()
    assert copies.host_page(1) == {0.0}


def test_a_copy_that_fails_has_ended_when_what_it_has_begun_has_run(
    monkeypatch: pytest.MonkeyPatch,
):
    device, ran = LateStreams(random.Random(0)), []
    copies, launch = Copies(device), device.copies.launch

    def fail(work: Callable[[], object]) -> None:
        launch(lambda: ran.append(1))
        raise RuntimeError("injected")

    monkeypatch.setattr(device.copies, "launch", fail)
    copies.to_host(1, 1, 1)
    ended = copies.ended.get(timeout=WAIT_S)
    assert (ended.error, ran) == ("RuntimeError: injected", [1])
    copies.thread.close()


def test_a_copy_that_hangs_ends_the_worker(monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    monkeypatch.setattr(copy_thread, "copy_moves", lambda *_: may_end.wait(WAIT_S))
    config = WorkerConfig("decode-0", WorkerRole.DECODE, Path("m"), "m", step_timeout=60.0)
    copies, idle = Copies(), SimpleNamespace(work=WorkInProgress())
    parts: Any = SimpleNamespace(forward=idle, agent=None, copies=copies.thread)
    try:
        copies.to_host(1, 0, 0)
        assert Assembly.hang(parts, config) is None
        copies.thread.work._since -= 3600
        given_up = Assembly.hang(parts, config)
        assert given_up is not None
        reason, hanging = given_up.reason, given_up.hanging_step
        assert reason.startswith("the copy to or from the host of 4 tokens has not ended"), reason
        assert hanging is None, "no forward's requests are to blame"
    finally:
        may_end.set()
        copies.thread.close()
    assert Assembly.hang(parts, config) is None


def test_a_copy_that_hangs_is_given_up_at_the_end_with_those_behind_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    may_end, begun = threading.Event(), queue.SimpleQueue[int]()

    def hang(moves: PageMoves, *_: object) -> None:
        begun.put(moves.operation)
        may_end.wait(WAIT_S)

    monkeypatch.setattr(copy_thread, "copy_moves", hang)
    copies = Copies()
    copies.to_host(1, 0, 0)
    copies.to_host(2, 1, 1)
    assert begun.get(timeout=WAIT_S) == 1
    copies.thread.close(0.1)
    assert not copies.thread.has_ended
    assert "have not ended for 0.1 s: 2 are given up" in caplog.text
    may_end.set()
    copies.thread._thread.join(WAIT_S)
    assert not copies.thread._thread.is_alive()
    assert (begun.empty(), copies.ended.empty()) == (True, True)


@pytest.mark.parametrize("stuck", ["", "forward", "agent"])
@pytest.mark.parametrize("hangs", [False, True])
def test_the_host_stays_pinned_while_a_thread_may_use_it(
    monkeypatch: pytest.MonkeyPatch, hangs: bool, stuck: str
):
    may_end, pinning = threading.Event(), LimitedPinning()
    monkeypatch.setattr(copy_thread, "copy_moves", lambda *_: may_end.wait(WAIT_S))
    monkeypatch.setattr(thread_end, "CLOSE_SECONDS", 0.1 if hangs else WAIT_S)
    copies = Copies()
    pinned = PinnedPools([copies.host], pinning)
    engine, forward, agent = (
        SimpleNamespace(close=lambda seconds: None, has_ended=name != stuck)
        for name in ("engine", "forward", "agent")
    )
    left: list[bool] = []
    cores = SimpleNamespace(close=lambda: left.append(True))
    parts: Any = SimpleNamespace(
        engine=engine,
        forward=forward,
        copies=copies.thread,
        storage=None,
        agent=agent,
        pinned=pinned,
        cores=cores,
    )
    copies.to_host(1, 0, 0)
    if not hangs:
        may_end.set()
    Assembly.stop_threads(parts)
    assert bool(left) is not (hangs or bool(stuck)), "the machine's workers see it"
    assert bool(pinning.pinned) is (hangs or bool(stuck))
    may_end.set()
    copies.thread._thread.join(WAIT_S)
