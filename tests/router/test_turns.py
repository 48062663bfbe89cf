"""Turns go round the callers; of too much work, the greediest loses its newest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvrelay.router.turns import FairTurns


class FullError(Exception):
    """Made for work that has no room."""


async def work(turns: FairTurns, caller: str, done: Callable[[str], object], size: int = 1) -> None:
    async with turns.turn(caller, size, FullError):
        done(caller)
        await asyncio.sleep(0)


async def test_one_of_each_caller_in_rotation() -> None:
    turns, order = FairTurns(1, 100), list[str]()
    tasks = [asyncio.create_task(work(turns, one, order.append)) for one in "aaaaabbc"]
    await asyncio.gather(*tasks)
    assert "".join(order) == "aabcabaa"
    assert turns.held == 0


async def test_work_that_is_cancelled_gives_its_turn_on() -> None:
    turns, order = FairTurns(1, 100), list[str]()
    tasks = [asyncio.create_task(work(turns, one, order.append)) for one in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()  # it waits
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c"]
    await turns.begin("a", 1, FullError)
    waits = asyncio.create_task(work(turns, "b", order.append))
    await asyncio.sleep(0)
    turns.end(1)
    waits.cancel()  # its turn has just come
    await asyncio.gather(waits, return_exceptions=True)
    await work(turns, "c", order.append)
    assert order == ["a", "c", "c"]
    assert turns.held == 0


async def test_nothing_is_dropped_for_work_that_gets_no_room_all_the_same() -> None:
    turns, order = FairTurns(1, 100), list[str]()
    await turns.begin("r", 60, FullError)  # it runs, and cannot be dropped
    tasks = [asyncio.create_task(work(turns, "a", order.append, size=5)) for _ in range(8)]
    await asyncio.sleep(0)
    for size in (39, 34, 29, 24):
        with pytest.raises(FullError):
            await work(turns, "b", order.append, size=size)
    turns.end(60)
    await asyncio.gather(*tasks)
    assert order == ["a"] * 8
    assert turns.held == 0


async def test_who_has_most_makes_room_and_nobody_else() -> None:
    turns, order = FairTurns(1, 4), list[str]()
    await turns.begin("a", 1, FullError)
    tasks = [asyncio.create_task(work(turns, one, order.append)) for one in "aaa"]
    await asyncio.sleep(0)
    with pytest.raises(FullError):
        await work(turns, "a", order.append)
    with pytest.raises(FullError):
        await work(turns, "b", order.append, size=5)
    tasks.append(asyncio.create_task(work(turns, "b", order.append)))
    await asyncio.sleep(0)
    turns.end(1)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended].index(FullError) == 2, "its newest"
    assert order == ["a", "b", "a"]
    assert turns.held == 0
    await work(turns, "a", order.append, size=5)  # alone, it may have any size
