"""Page tables that are sent as changes: the device always has the whole table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention import device_table
from kvrelay.model_runner.attention.device_table import DeviceTable, gather_page_ids, table_changes
from kvrelay.model_runner.attention.paged_plan import plan_pages, visible_pages
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.torch_options import copy_array
from tests.model_runner.test_attention import make_batch

CPU = torch.device("cpu")
GEOMETRY = KVGeometry(1, 1, 64, torch.bfloat16, 4)


@dataclass
class Requests:
    """Running requests and their pages, as a scheduler changes them from step to step."""

    columns: int
    rows: list[list[int]] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(200)))

    def join(self, pages: int) -> None:
        self.rows.append([])
        self.grow(len(self.rows) - 1, pages)

    def leave(self, row: int) -> None:
        """Also one that is taken back: its pages may be another's at once."""
        self.free += [page for page in self.rows.pop(row) if page >= 0]

    def grow(self, row: int, pages: int) -> None:
        for _ in range(min(pages, self.columns - len(self.rows[row]))):
            self.rows[row].append(self.free.pop())

    def slide(self, row: int, pages: int) -> None:
        """Let the oldest pages go: a window is past them."""
        for column in range(min(pages, len(self.rows[row]))):
            if self.rows[row][column] >= 0:
                self.free.append(self.rows[row][column])
                self.rows[row][column] = -1

    def refuse(self, row: int, pages: int) -> None:
        """Give back pages of drafts; the next ones there are others."""
        for _ in range(min(pages, len(self.rows[row]) - 1)):
            self.free.insert(0, self.rows[row].pop())

    def swap(self, row: int) -> None:
        self.rows.append(self.rows.pop(row))

    def table(self) -> Int32Array:
        table = np.full((len(self.rows), self.columns), -1, np.int32)
        for index, row in enumerate(self.rows):
            table[index, : len(row)] = row
        return table


changes_of_a_step = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "grow", "slide", "refuse", "swap"]),
        st.integers(0, 7),
        st.integers(1, 4),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(changes_of_a_step, min_size=1, max_size=25), columns=st.integers(1, 9))
def test_the_device_has_the_whole_table_after_each_step(
    steps: list[list[tuple[str, int, int]]], columns: int
) -> None:
    requests, device = Requests(columns), DeviceTable(CPU)
    for step in steps:
        change(requests, step)
        table = requests.table()
        got = device.update(table)
        table[:] = 77  # the scheduler goes on with its own
        assert torch.equal(got[:, :columns], torch.from_numpy(requests.table()))


def change(requests: Requests, steps: list[tuple[str, int, int]]) -> None:
    for what, row, pages in steps:
        if what == "join" and len(requests.rows) < 8:
            requests.join(pages)
        elif what in ("leave", "swap") and requests.rows:
            getattr(requests, what)(row % len(requests.rows))
        elif what != "join" and requests.rows:
            getattr(requests, what)(row % len(requests.rows), pages)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each copy to the device had."""
    sizes: list[int] = []

    def count(array: Int32Array, target: torch.Tensor) -> None:
        sizes.append(array.size)
        copy_array(array, target)

    monkeypatch.setattr(device_table, "copy_array", count)
    return sizes


def test_a_step_sends_its_new_pages_alone(sent: list[int]) -> None:
    requests, device = Requests(100), DeviceTable(CPU)
    for _ in range(20):
        requests.join(5)
    device.update(requests.table())
    assert sent == [20 * 128]
    device.update(requests.table())
    requests.columns += 28
    device.update(requests.table())
    assert sent == [20 * 128]  # nothing has changed
    requests.grow(3, 1)
    requests.grow(17, 2)
    device.update(requests.table())
    assert sent[1:] == [2 * 3]
    requests.leave(0)
    device.update(requests.table())
    assert sent[2:] == [19 * 128]  # a batch of another shape
    requests.columns += 1
    device.update(requests.table())
    assert sent[3:] == [19 * 192]


def test_many_changes_are_sent_as_the_whole(sent: list[int]) -> None:
    requests, device = Requests(64), DeviceTable(CPU)
    for _ in range(3):
        requests.join(64)
    device.update(requests.table())
    requests.swap(0)  # all rows are others now
    got = device.update(requests.table())
    assert sent == [3 * 64] * 2
    assert torch.equal(got, torch.from_numpy(requests.table()))


def test_after_a_table_that_could_not_be_sent_the_next_one_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step fails; the next one may have the shape of what was sent last."""
    requests, device = Requests(64), DeviceTable(CPU)
    for _ in range(2):
        requests.join(40)
    device.update(requests.table())

    def fail(array: Int32Array, target: torch.Tensor) -> None:
        target.fill_(77)
        raise RuntimeError("no pinned memory")

    more = np.tile(requests.table(), (4, 1))
    monkeypatch.setattr(device_table, "copy_array", fail)
    with pytest.raises(RuntimeError, match="pinned"):
        device.update(more)
    monkeypatch.undo()
    requests.grow(0, 1)
    got = device.update(requests.table())
    assert torch.equal(got, torch.from_numpy(requests.table()))


def test_memory_is_kept_while_it_suffices() -> None:
    """And not counted twice."""
    device = DeviceTable(CPU)
    device.update(np.zeros((4, 8), np.int32))
    taken = device.nbytes
    first = device.update(np.ones((8, 8), np.int32))
    second = device.update(np.ones((2, 3), np.int32))
    assert first.data_ptr() == second.data_ptr()
    assert device.nbytes == taken
    assert second.shape == (2, 64)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(
        st.integers(1, 40).flatmap(lambda all_: st.tuples(st.integers(0, all_), st.just(all_))),
        min_size=1,
        max_size=5,
    ),
    page_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 45),
)
def test_page_ids_on_the_device_are_those_of_the_plan(
    lengths: list[tuple[int, int]], page_size: int, window: int | None
) -> None:
    geometry = replace(GEOMETRY, page_size=page_size, window=window)
    batch = make_batch(lengths, geometry, 5 * geometry.pages_for(40) + 3)
    (table,) = batch.page_tables
    first, end = visible_pages(batch, geometry)
    got = gather_page_ids(DeviceTable(CPU).update(table), plan_pages(batch, geometry))
    assert got.dtype is torch.int32
    rows = zip(table.tolist(), first, end, strict=True)
    assert got.tolist() == [page for row, begin, stop in rows for page in row[begin:stop]]


def test_changes_have_the_page_ids_of_now() -> None:
    before = np.array([[1, 2, -1], [3, -1, -1]], np.int32)
    now = np.array([[-1, 2, 5], [3, 4, -1]], np.int32)
    changes = table_changes(before, now)
    assert changes.dtype == np.int32
    assert changes.tolist() == [[0, 2, 4], [-1, 5, 4]]
