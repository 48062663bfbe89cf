"""Ten thousand sessions that are opened and left: memory is bounded, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay.engine.scheduler.session_turns import SessionTurns
from tests.cluster.in_process import InProcess, in_process
from tests.cluster.test_sessions import Chat, some_tokens

pytestmark = pytest.mark.alone  # it measures memory, and sessions expire
SESSIONS = 10_000
AT_ONCE = 24
IDLE_SECONDS = 4.0
LATE_SECONDS = 4.0
"""A session is looked at every second; the machine may be busy with something else."""
WARM = 4_000
"""Sessions after which every buffer and cache has its size."""
MOST_GROWTH_BYTES = 24 << 20
"""Of the process that has router, worker and client: 4 KiB for each session after `WARM`. One that
nobody forgets is found by the counts at the end, however small it is."""
SHORT: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def turns_of(cluster: InProcess) -> SessionTurns:
    sessions: SessionTurns = cluster.hosted[0]._parts.plugin.scheduler._context.session_turns  # type: ignore[attr-defined]
    return sessions


async def leave(cluster: InProcess, number: int) -> None:
    """Open a session, say one thing, and never come back."""
    chat = await Chat(cluster, f"left {number}").open(idle_timeout_seconds=IDLE_SECONDS)
    async for _ in chat.turn(some_tokens(number, 6), **SHORT):
        pass


async def stay(cluster: InProcess, number: int) -> Chat:
    """One that is gone on with now and then."""
    chat = await Chat(cluster, f"stays {number}").open()
    await chat.say(some_tokens(number, 30), **SHORT)
    return chat


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_10_000_sessions_that_are_left(tiny: Path) -> None:
    """Those that are gone on with have their tokens, whatever was evicted for the others."""
    async with in_process(
        tiny,
        prefill=0,
        decode=0,
        aggregated=1,
        kv_memory=1 << 20,
        host_kv_memory=2 << 20,  # it is full soon, too
        max_running=32,
    ) as cluster:
        staying = [await stay(cluster, number) for number in range(5)]
        most_kept = warm_bytes = 0
        left_at: list[float] = []
        for first in range(0, SESSIONS, AT_ONCE):
            count = min(AT_ONCE, SESSIONS - first)
            await asyncio.gather(*(leave(cluster, first + number) for number in range(count)))
            left_at += [time.monotonic()] * count
            lately = [at for at in left_at if left_at[-1] - at < IDLE_SECONDS + LATE_SECONDS]
            assert len(cluster.router._sessions) <= len(lately) + len(staying), "they expire"
            most_kept = max(most_kept, len(turns_of(cluster)))
            if first % (50 * AT_ONCE) == 0:
                await asyncio.gather(
                    *(chat.say(some_tokens(first, 5), **SHORT, rewind_to=30) for chat in staying)
                )
            if first <= WARM < first + AT_ONCE:
                warm_bytes = resident_bytes()
        growth = resident_bytes() - warm_bytes
        assert 0 < most_kept <= 32
        assert growth < MOST_GROWTH_BYTES
        for chat in staying:
            await chat.say([7, 8], **SHORT)
            await chat.close()
        async with asyncio.timeout(3 * IDLE_SECONDS + 10):
            while len(cluster.router._sessions) or len(turns_of(cluster)):
                await asyncio.sleep(0.1)
        sessions = cluster.router._sessions
        known = (sessions._by_name, sessions._num_by_owner, sessions._tokens_by_owner)
        assert not any(known)
        assert sessions._num_tokens == 0
        expired = await cluster.metric("kvrelay_router_session_ends_total", reason="expired")
        assert expired == SESSIONS
        kept = turns_of(cluster)
        left = (kept._ended, kept._sessions, kept._sessions._idle_tokens, kept._histories)
        assert [len(one) for one in left] == [0] * 4
        await cluster.assert_at_baseline()
