from __future__ import annotations

import asyncio
import time

from kvrelay.deploy.pauses import is_done_within


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
