"""Coroutines that go on in the turn of who brings what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrelay.router.eager import Signal, run_eagerly


class Counting:
    """Counts what it was given, and awaits a future after every second one."""

    def __init__(self) -> None:
        self.more = Signal()
        self.seen: list[int] = []
        self.given: list[int] = []
        self.pauses: list[asyncio.Future[None]] = []
        self.left = False

    def give(self, number: int) -> None:
        self.given.append(number)
        self.more.give()

    async def count(self, most: int) -> None:
        try:
            while len(self.seen) < most:
                while len(self.seen) == len(self.given):
                    await self.more
                self.seen.append(self.given[len(self.seen)])
                if len(self.seen) % 2 == 0:
                    self.pauses.append(asyncio.get_running_loop().create_future())
                    await self.pauses[-1]
        finally:
            self.left = True


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Counting, asyncio.Task[None]]]:
    """One that waits for the first of five."""
    one = Counting()
    task = asyncio.create_task(run_eagerly(one.count(5)))
    await asyncio.sleep(0)
    yield one, task
    task.cancel()


async def test_what_is_given_is_taken_at_once(counting: tuple[Counting, asyncio.Task[None]]):
    one, task = counting
    one.give(1)
    assert one.seen == [1]
    one.give(2)
    one.give(3)
    assert one.seen == [1, 2]  # it awaits a future
    one.pauses[0].set_result(None)
    assert one.seen == [1, 2]  # which wakes it as it does a task
    await asyncio.sleep(0)
    assert one.seen == [1, 2, 3]
    one.give(4)
    one.give(5)
    one.pauses[1].set_result(None)
    await task
    assert one.seen == [1, 2, 3, 4, 5]


async def test_what_it_raises_is_raised_where_it_is_run_and_not_where_it_goes_on():
    more = Signal()

    async def fail() -> None:
        await more
        raise ValueError("no")

    task = asyncio.create_task(run_eagerly(fail()))
    await asyncio.sleep(0)
    more.give()
    with pytest.raises(ValueError, match="no"):
        await task


async def test_a_failed_future_is_raised_in_it(counting: tuple[Counting, asyncio.Task[None]]):
    one, task = counting
    one.give(1)
    one.give(2)
    one.pauses[0].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task
    assert one.left


async def test_one_that_is_cancelled_does_not_go_on(
    counting: tuple[Counting, asyncio.Task[None]],
):
    one, task = counting
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    one.give(1)
    assert one.seen == []


async def test_what_it_waits_for_is_cancelled_with_it(
    counting: tuple[Counting, asyncio.Task[None]],
):
    one, task = counting
    one.give(1)
    one.give(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert one.pauses[0].cancelled()
    assert one.left
    one.give(3)
    assert one.seen == [1, 2]


async def test_its_own_cancellation_is_one_of_who_runs_it():
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_eagerly(give_up())
