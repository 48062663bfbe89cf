"""Page tables that are sent as changes while steps run that read what was sent before."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvrelay.device.device_streams import STEPS_IN_FLIGHT, DeviceEvent
from kvrelay.model_runner.attention import device_table
from kvrelay.model_runner.attention.device_table import DeviceTable, gather_page_ids
from kvrelay.model_runner.attention.paged_plan import plan_pages
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from tests.late_device import LateStreams
from tests.late_operations import LateOperations
from tests.model_runner.test_device_table import CPU, GEOMETRY, Requests, change

COLUMNS = device_table.COLUMNS
CHANGES = ("join", "leave", "grow", "grow", "grow", "slide", "refuse", "swap")


class InFlight(NamedTuple):
    """A step that was launched, and what its kernels must find."""

    home: DeviceEvent
    table: Int32Array
    page_ids: Int32Array
    seen: list[torch.Tensor]
    """What they have found: the table, and the page ids that were gathered from it."""


class Worker:
    """Launches steps over tables that lie in staging, two of them at a time."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.device = LateStreams(self.rng)
        self.staging = self.device.make_staging()
        self.requests = Requests(COLUMNS)
        self.table = DeviceTable(CPU)
        self.in_flight: deque[InFlight] = deque()
        self.sent_changes = 0
        monkeypatch.setattr(device_table, "copy_array", self.copy_array)
        monkeypatch.setattr(device_table, "pin_to_device", pin_to_device)
        for _ in range(4):
            self.requests.join(5)

    def copy_array(self, array: Int32Array, target: torch.Tensor) -> None:
        """As on a GPU: the array may change at once, and arrives later."""
        self.sent_changes += array.ndim == 2
        target.copy_(torch.from_numpy(array.copy()))

    def launch(self) -> None:
        """A step of decode; nothing of it runs before the adversary comes to it."""
        requests = self.requests
        change(requests, [(self.rng.choice(CHANGES), self.rng.randrange(8), 1)])
        while not any(requests.rows):
            change(requests, [("join", 0, 2)])
        staging, tables, seen = self.staging.begin(), requests.table(), list[torch.Tensor]()
        table = staging.put(tables)
        batch = decode_of(table)
        plan = plan_pages(batch, GEOMETRY)
        with LateOperations(self.device.forward):
            on_device = self.table.update(table)
            page_ids = gather_page_ids(on_device, plan)
        # Two kernels, between which others may run.
        for what in (on_device, page_ids):
            self.device.forward.launch(partial(_see, what, seen))
        home = self.device.forward.record()
        staging.use_until(home)
        own = [row[:pages] for row, pages in zip(tables, np.diff(plan.kv_indptr), strict=True)]
        self.in_flight.append(InFlight(home, tables, np.concatenate(own), seen))

    def end_oldest(self) -> None:
        """Wait for a step, which has read its own pages and nobody else's."""
        step = self.in_flight.popleft()
        step.home.wait()
        table, page_ids = step.seen
        assert np.array_equal(table.numpy(), step.table), "another step's table"
        assert np.array_equal(page_ids.numpy(), step.page_ids), "another step's pages"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.in_flight) >= STEPS_IN_FLIGHT:
                self.end_oldest()
            self.launch()
            for _ in range(self.rng.randint(0, 6)):
                if self.device.can_run:
                    self.device.run_one()
        while self.in_flight:
            self.end_oldest()


def pin_to_device(array: Int32Array, _: torch.device) -> torch.Tensor:
    """As `Worker.copy_array`: the copy is there later."""
    return torch.from_numpy(array.copy()).clone()


def _see(what: torch.Tensor, seen: list[torch.Tensor]) -> None:
    seen.append(what.clone())


def decode_of(table: Int32Array) -> ForwardBatch:
    """One new token of each request, which is the first on its last page."""
    lengths = (table >= 0).cumsum(1).argmax(1).astype(np.int32) * GEOMETRY.page_size + 1
    rows = len(table)
    return ForwardBatch(
        input_ids=np.zeros(rows, np.int64),
        positions=lengths.astype(np.int64) - 1,
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=lengths,
        page_tables=(table,),
        logit_rows=np.arange(rows),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_step_reads_its_own_pages_while_the_next_ones_are_sent(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(seed, monkeypatch)
    worker.run(60)
    assert worker.sent_changes > 10


Plant = Callable[[pytest.MonkeyPatch, Worker], None]


def send_beside_the_forward(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    """On another stream: the step before still reads the table."""
    send = DeviceTable._send

    def beside(self: Any, changes: Any) -> None:
        with LateOperations(worker.device.copies):
            send(self, changes)

    patch.setattr(DeviceTable, "_send", beside)


def write_at_once(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    """By the host, as over memory that both can write."""

    def send(self: Any, changes: Any) -> None:
        self._pages.numpy()[changes[0]] = changes[1]

    patch.setattr(DeviceTable, "_send", send)


def remember_what_has_arrived(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    """Changes are those since the step that has ended, not since the one that was launched."""
    update = DeviceTable.update

    def late(self: Any, table: Any) -> Any:
        before = self._sent
        try:
            return update(self, table)
        finally:
            if worker.in_flight and before.shape == self._sent.shape:
                self._sent = before

    patch.setattr(DeviceTable, "update", late)


def gather_before_it_is_sent(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    """Page ids are gathered on another stream than the table's."""
    gather = device_table.gather_page_ids

    def beside(*args: Any) -> Any:
        with LateOperations(worker.device.copies):
            return gather(*args)

    patch.setitem(globals(), "gather_page_ids", beside)


@pytest.mark.parametrize(
    "plant",
    [
        send_beside_the_forward,
        write_at_once,
        remember_what_has_arrived,
        gather_before_it_is_sent,
    ],
)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, IndexError), match=r"another step's|out of"):
        run_often(plant, monkeypatch)


def run_often(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        worker = Worker(seed, monkeypatch)
        with monkeypatch.context() as patch:
            plant(patch, worker)
            worker.run(60)
