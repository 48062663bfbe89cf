from __future__ import annotations

import asyncio
import time

import pytest

from kvrelay.deploy.bounded_waits import Pauses, finished, is_done_within


async def test_what_comes_in_time_is_waited_for():
    assert await is_done_within(asyncio.create_task(asyncio.sleep(0.05)), 30)


async def test_what_does_not_come_in_time_is_left_running():
    task = asyncio.create_task(asyncio.sleep(60))
    assert not await is_done_within(task, 0.05)
    assert not task.done()
    task.cancel()


async def test_a_time_in_which_this_loop_did_not_run_does_not_count():
    answer = asyncio.create_task(asyncio.sleep(0.2))
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 1)
    assert await is_done_within(answer, 0.5)


async def test_pauses_double_up_to_their_limit():
    pauses, seconds = Pauses(longest_seconds=0.4), []
    for _ in range(4):
        began = time.monotonic()
        await pauses.pause()
        seconds.append(time.monotonic() - began)
    for least, slept in zip((0.1, 0.2, 0.4, 0.4), seconds, strict=True):
        assert slept > least - 0.01


async def test_what_must_be_done_is_done_however_often_it_is_cancelled():
    done = asyncio.Event()
    waiting = asyncio.create_task(finished(done.wait()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    done.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_must_be_done_and_fails_says_so():
    async def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await finished(fail())
