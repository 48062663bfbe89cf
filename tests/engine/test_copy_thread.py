"""The thread that copies between device and host: each copy ends once, whatever happens to it."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor import copy_thread
from kvrelay.engine.executor.copy_thread import CopyThread
from kvrelay.engine.worker.assembly import Assembly
from kvrelay.kv_transfer.work_in_progress import WorkInProgress
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.tier_copies import CopyEnded, PageMoves
from kvrelay.wire.worker_info import WorkerRole

WAIT_S = 30.0
GEOMETRY = KVGeometry(2, 1, 8, torch.float32, page_size=4, order=PageOrder.LAYER_FIRST)


class Copies:
    """A copy thread between a device of six pages, each filled with its number, and a host."""

    def __init__(self) -> None:
        cpu, host = torch.device("cpu"), replace(GEOMETRY, order=PageOrder.PAGE_FIRST)
        self.device, self.host = KVPool(GEOMETRY, 6, cpu), KVPool(host, 6, cpu)
        for layer in range(2):
            for page in range(6):
                self.device.layer(layer)[page] = page
        self.ended: queue.SimpleQueue[CopyEnded] = queue.SimpleQueue()
        self.thread = CopyThread([self.device], [self.host], self.ended.put)

    def to_host(self, number: int, device_page: int, host_page: int) -> None:
        pages = np.array([device_page], np.int32), np.array([host_page], np.int32)
        self.thread.start(PageMoves(number, True, pages[:1], pages[1]))

    def host_page(self, page: int) -> set[float]:
        return {x for layer in range(2) for x in self.host.layer(layer)[page].flatten().tolist()}


def test_a_copy_that_fails_is_told_and_those_behind_it_are_made():
    copies = Copies()
    copies.to_host(1, 6, 0)  # there is no such page
    copies.to_host(2, 5, 3)
    copies.thread.close()
    failed, made = copies.ended.get(timeout=WAIT_S), copies.ended.get(timeout=WAIT_S)
    assert (failed.operation, made.operation, made.error) == (1, 2, "")
    assert failed.error.startswith("ValueError: ")
    assert (copies.host_page(0), copies.host_page(3)) == ({0.0}, {5.0})
    assert copies.ended.empty()
    assert copies.thread.work.oldest is None


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
