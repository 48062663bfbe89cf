"""Texts are worked on in threads, the short ones beside the long ones, and bounded in bytes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.router.admission.tokenizer_threads import TextThreads
from kvrelay.router.errors import TextQueueFull

from .scripted_worker import until

SHORT, LONG = 100, 2 << 20
ME, OTHER = "me", "other"


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.let_go.wait(60)
        return "done"


@pytest.fixture
def texts() -> Iterator[TextThreads]:
    texts = TextThreads(3 * LONG, retry_after_ms=500)
    yield texts
    texts.close()


async def test_a_short_text_does_not_wait_for_long_ones(texts: TextThreads) -> None:
    first, second = Held(), Held()
    running = asyncio.create_task(texts.run(ME, LONG, first))
    waiting = asyncio.create_task(texts.run(ME, LONG, second))
    await until(first.began.is_set)
    assert await texts.run(ME, SHORT, lambda: "short") == "short"
    assert not second.began.is_set()
    first.let_go.set()
    second.let_go.set()
    assert await asyncio.gather(running, waiting) == ["done", "done"]
    await until(lambda: texts.held_bytes == 0)


async def test_more_bytes_than_it_takes_are_refused(texts: TextThreads) -> None:
    held = Held()
    tasks = [asyncio.create_task(texts.run(ME, LONG, held)) for _ in range(3)]
    await until(held.began.is_set)
    with pytest.raises(TextQueueFull) as caught:
        await texts.run(ME, LONG, lambda: None)
    assert str(3 * LONG) in str(caught.value)
    assert await texts.run(ME, SHORT, lambda: "short") == "short"  # they keep no short ones out
    held.let_go.set()
    await asyncio.gather(*tasks)
    await until(lambda: texts.held_bytes == 0)
    await texts.run(ME, 4 * LONG, lambda: None)  # alone, a text may have any length
    await until(lambda: texts.held_bytes == 0)


async def test_of_cancelled_calls_only_what_runs_goes_on(texts: TextThreads) -> None:
    first, second = Held(), Held()
    running = asyncio.create_task(texts.run(ME, LONG, first))
    waiting = asyncio.create_task(texts.run(ME, LONG, second))
    await until(first.began.is_set)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    await until(lambda: texts.held_bytes == LONG)  # it still runs, and takes memory
    first.let_go.set()
    await until(lambda: texts.held_bytes == 0)
    assert not second.began.is_set()


async def test_the_text_of_a_cancelled_call_is_let_go_of(texts: TextThreads) -> None:
    class Text:
        """What a string cannot be: weakly referenced."""

    def work(text: Text) -> None:
        raise AssertionError("it was cancelled")

    first, text = Held(), Text()
    running = asyncio.create_task(texts.run(ME, LONG, first))
    await until(first.began.is_set)
    waiting = asyncio.create_task(texts.run(ME, LONG, work, text))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    del waiting
    gone = weakref.ref(text)
    del text
    gc.collect()
    assert gone() is None, "while the thread is busy with another text"
    first.let_go.set()
    assert await running == "done"


async def test_what_the_work_raises_is_raised(texts: TextThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        await texts.run(ME, SHORT, lambda: 1 // 0)
    await until(lambda: texts.held_bytes == 0)


async def test_callers_take_turns_however_many_texts_one_has(texts: TextThreads) -> None:
    held, done = Held(), list[str]()
    size = LONG // 2 + 1
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(texts.run(ME, size, held))]
    await until(held.began.is_set)
    tasks += [
        asyncio.create_task(texts.run(ME, size, done.append, f"mine {number}"))
        for number in range(3)
    ]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(texts.run(OTHER, size, done.append, "another's")))
    await asyncio.sleep(0)
    held.let_go.set()
    await asyncio.gather(*tasks)
    assert done == ["mine 0", "another's", "mine 1", "mine 2"]


async def test_the_caller_with_the_most_makes_room_for_others(texts: TextThreads) -> None:
    held = Held()
    mine = [asyncio.create_task(texts.run(ME, LONG, held)) for _ in range(3)]
    await until(held.began.is_set)
    other = asyncio.create_task(texts.run(OTHER, LONG // 2 + 1, lambda: "done"))
    with pytest.raises(TextQueueFull):
        await mine[2]
    held.let_go.set()
    assert await other == "done"
    await asyncio.gather(*mine[:2])
    await until(lambda: texts.held_bytes == 0)
