"""Coroutines that go on in the turn of who brings what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrelay.router.requests.inline_coroutine import MORE, InlineCoroutine


class Counting:
    """Counts what it was given, and awaits a future after every second one."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.given: list[int] = []
        self.pauses: list[asyncio.Future[None]] = []
        self.left = False
        self.run = InlineCoroutine(self.count(5), lambda: len(self.given) == len(self.seen))

    def give(self, number: int) -> None:
        self.given.append(number)
        self.run.go_on()

    async def count(self, most: int) -> None:
        try:
            while len(self.seen) < most:
                while len(self.seen) == len(self.given):
                    await MORE
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
    task = asyncio.create_task(one.run.end())
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
    assert one.seen == [1, 2]  # which wakes it as it does a task, for more was given
    await asyncio.sleep(0)
    assert one.seen == [1, 2, 3]
    one.give(4)
    one.give(5)
    one.pauses[1].set_result(None)
    await task
    assert one.seen == [1, 2, 3, 4, 5]


async def test_it_is_not_woken_for_what_may_rest(counting: tuple[Counting, asyncio.Task[None]]):
    one, _ = counting
    one.give(1)
    one.give(2)
    assert not one.pauses[0]._callbacks
    one.pauses[0].set_result(None)
    await asyncio.sleep(0)
    one.give(3)
    assert one.seen == [1, 2, 3]


async def test_what_it_raises_is_raised_where_it_is_run_and_not_where_it_goes_on():
    async def fail() -> None:
        await MORE
        raise ValueError("no")

    run = InlineCoroutine(fail(), lambda: True)
    task = asyncio.create_task(run.end())
    await asyncio.sleep(0)
    run.go_on()
    with pytest.raises(ValueError, match="no"):
        await task
    run.go_on()  # nothing is left to do


async def test_a_failed_future_is_raised_in_it(counting: tuple[Counting, asyncio.Task[None]]):
    one, task = counting
    one.give(1)
    one.give(2)
    one.pauses[0].set_exception(ValueError("no"))
    one.give(3)
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


@pytest.mark.parametrize("more", [False, True], ids=["resting", "with more"])
async def test_what_it_waits_for_is_cancelled_with_it(
    counting: tuple[Counting, asyncio.Task[None]], more: bool
):
    one, task = counting
    for number in range(2 + more):
        one.give(number)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert one.pauses[0].cancelled()
    one.give(3)
    assert one.seen == [0, 1]


async def test_one_that_is_cancelled_still_takes_the_end_of_what_is_done(
    counting: tuple[Counting, asyncio.Task[None]],
):
    one, task = counting
    one.give(1)
    one.give(2)
    one.pauses[0].set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    one.pauses.clear()
    assert one.run._awaited is MORE


async def test_its_own_cancellation_is_one_of_who_runs_it():
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await InlineCoroutine(give_up(), lambda: True).end()
