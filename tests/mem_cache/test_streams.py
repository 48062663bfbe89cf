"""What streams, events and staging promise: on a CPU, on a device that is late, and on a GPU."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvrelay.device.cuda_streams import CudaStreams, make_streams
from kvrelay.device.device_streams import (
    KEPT_USES,
    LARGE_BYTES,
    STEPS_IN_FLIGHT,
    ImmediateStreams,
    PinnedStaging,
    StagingSet,
    Streams,
)
from tests.late_device import SPOILT, DeviceError, LateStreams


def late(seed: int) -> LateStreams:
    return LateStreams(random.Random(seed))


MAKERS: dict[str, Callable[[], Streams]] = {
    "cpu": ImmediateStreams,
    **{f"late {seed}": partial(late, seed) for seed in range(8)},
    "cuda": lambda: CudaStreams(torch.device("cuda", 0)),
}
IMPLEMENTATIONS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ]
        * (name == "cuda"),
    )
    for name in MAKERS
]


def append_digit(counter: torch.Tensor, digit: int) -> None:
    counter.mul_(10).add_(digit)


def add_sum(target: torch.Tensor, array: npt.NDArray[Any]) -> None:
    target.add_(torch.from_numpy(array).to(target.device, non_blocking=True).sum())


def bring(staging: StagingSet, there: torch.Tensor, home: list[torch.Tensor]) -> None:
    home.append(staging.bring(there))


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if name == "cuda" else "cpu")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_work_of_a_stream_runs_in_order(name: str) -> None:
    streams = MAKERS[name]()
    streams.enter_thread()
    counter = torch.zeros(1, dtype=torch.int64, device=device_of(name))
    for digit in range(1, 6):
        streams.forward.launch(partial(append_digit, counter, digit))
    streams.forward.record().wait()
    assert counter.tolist() == [12345]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_stream_waits_for_anothers_event(name: str) -> None:
    streams = MAKERS[name]()
    device = device_of(name)
    written, read = torch.zeros(4096, device=device), torch.zeros(4096, device=device)
    for number in range(1, 5):
        streams.forward.launch(partial(written.fill_, number))
        streams.results.wait_for(streams.forward.record())
        streams.results.launch(lambda: read.copy_(written))
        streams.forward.wait_for(streams.results.record())
    home = streams.results.record()
    home.wait()
    assert home.passed()
    assert set(read.tolist()) == {4.0}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_staging_keeps_what_work_reads_until_it_has_run(name: str) -> None:
    """Through as many steps as use each set several times; some need more than was allocated."""
    streams, device = MAKERS[name](), device_of(name)
    staging = streams.make_staging()
    read: list[torch.Tensor] = []
    expected: list[list[int]] = []
    for step in range(8):
        chosen = staging.begin()
        arrays: list[npt.NDArray[Any]] = [np.full(3 + step, step, np.int32), np.arange(5) + step]
        if step in (3, 6):
            arrays.append(np.full((200 * step, 1000), step, np.int64))
        expected.append([int(array.sum()) for array in arrays])
        staged = [chosen.put(array) for array in arrays]
        if not streams.is_immediate:  # there they are the arrays themselves
            for array in arrays:
                array.fill(-1)
        sums = torch.zeros(len(staged), dtype=torch.int64, device=device)
        for place, array in enumerate(staged):
            streams.forward.launch(partial(add_sum, sums[place : place + 1], array))
        chosen.use_until(streams.forward.record())
        read.append(sums)
    streams.forward.record().wait()
    assert [sums.tolist() for sums in read] == expected


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_brought_is_there_when_the_event_has_passed(name: str) -> None:
    streams, device = MAKERS[name](), device_of(name)
    staging = streams.make_staging()
    for step in range(5):
        chosen = staging.begin()
        there = torch.zeros(7, dtype=torch.float64, device=device)
        home: list[torch.Tensor] = []
        streams.forward.launch(partial(there.add_, step))
        streams.results.wait_for(streams.forward.record())
        streams.results.launch(partial(bring, chosen, there, home))
        event = streams.results.record()
        chosen.use_until(event)
        event.wait()
        assert home[0].device.type == "cpu"
        assert home[0].tolist() == [float(step)] * 7


def test_a_set_waits_for_the_end_of_its_last_use() -> None:
    late = LateStreams(random.Random(0))
    staging = late.make_staging()
    first = staging.begin()
    staged = first.put(np.arange(3))
    seen: list[list[int]] = []
    late.forward.launch(lambda: seen.append(staged.tolist()))
    first.use_until(late.forward.record())
    staging.begin().use_until(late.forward.record())
    assert not seen
    again = staging.begin()
    assert again is first
    assert seen == [[0, 1, 2]]
    assert set(staged.view(np.uint8).tolist()) == {SPOILT}, "the double does not spoil it"


class Memory:
    """Counts what is allocated, and what of it is still referred to."""

    def __init__(self) -> None:
        self.allocations = 0
        self._blocks: list[weakref.ref[torch.Tensor]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocations += 1
        block = torch.zeros(nbytes, dtype=torch.uint8)
        self._blocks.append(weakref.ref(block))
        return block

    @property
    def held_bytes(self) -> int:
        return sum(len(block) for one in self._blocks if (block := one()) is not None)


def test_arrays_of_any_size_lie_apart_and_aligned() -> None:
    memory = Memory()
    staging = PinnedStaging(memory.allocate)
    for step in range(6):
        chosen = staging.begin()
        sizes = (0, 1, 3, 64, 65, 0, 300_000, 7, 200_000)
        staged = [chosen.put(np.full(size, size, np.int64)) for size in sizes]
        assert [array.tolist() for array in staged] == [[size] * size for size in sizes]
        assert all(array.ctypes.data % 8 == 0 for array in staged)
        if step == 3:
            grown = memory.allocations
    assert memory.allocations == grown, "each set uses its memory again"


def test_memory_grows_to_what_one_step_needs_and_not_to_the_sum_of_all() -> None:
    """A client chooses how many tokens of its prompt are scored: each a row of the vocabulary."""
    memory = Memory()
    staging, row = PinnedStaging(memory.allocate), 150_000
    for rows in [*range(1, 20), 2]:
        chosen = staging.begin()
        table = chosen.put(np.full((rows, 40_000), rows, np.int32))
        home = chosen.bring(torch.full((rows, row), float(rows)))
        assert set(home[:, ::9999].flatten().tolist()) == {float(rows)}
        assert int(table.min()) == rows
        del home, table
    largest = 19 * 40_000 * 4
    assert memory.held_bytes <= 2 * 2 * largest, "two sets, of up to twice the largest step"


def test_memory_that_no_step_needs_any_more_is_given_back() -> None:
    """What long chunks need now and then stays, until there are none for so many uses."""
    memory, large = Memory(), 8 * LARGE_BYTES
    staging = PinnedStaging(memory.allocate)

    def step(nbytes: int) -> None:
        array = staging.begin().put(np.full(nbytes, 7, np.uint8))
        assert int(array.min()) == 7

    for _ in range(2 * STEPS_IN_FLIGHT):
        step(large)
    grown = memory.allocations
    for number in range(6 * KEPT_USES):
        step(large if number % (KEPT_USES - 1) == 0 else 100)  # by both sets in turn
    assert memory.allocations == grown, "it is needed again and again"
    assert memory.held_bytes == STEPS_IN_FLIGHT * large
    for _ in range(2 * STEPS_IN_FLIGHT * KEPT_USES):
        step(100)
    assert memory.held_bytes == STEPS_IN_FLIGHT * LARGE_BYTES
    assert memory.allocations == grown + STEPS_IN_FLIGHT
    step(large)


def test_what_fails_on_the_device_is_told_by_every_later_event() -> None:
    late, ran = LateStreams(random.Random(0)), []

    def fail() -> None:
        raise DeviceError("injected")

    before = late.forward.record()
    late.forward.launch(fail)
    late.forward.launch(lambda: ran.append(1))
    behind = late.forward.record()
    before.wait()
    with pytest.raises(RuntimeError, match="CUDA error: injected"):
        behind.wait()
    assert not ran


def test_a_cpu_needs_no_other_thread_and_no_memory() -> None:
    streams = make_streams(torch.device("cpu"))
    array, tensor, threads = np.arange(3), torch.arange(3), threading.active_count()
    staging = streams.make_staging().begin()
    assert staging.put(array) is array
    assert staging.bring(tensor) is tensor
    ran: list[str] = []
    streams.forward.launch(lambda: ran.append(threading.current_thread().name))
    assert ran == [threading.current_thread().name]
    assert streams.forward.record().passed()
    assert threading.active_count() == threads
