"""A request's way from P to D, in the stream of the live page and in a browser."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.net.door_rules import HTTP
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http import live_page
from kvrelay.v1 import worker_pb2

from ..cluster import Cluster
from ..scripted_worker import HANDED_OVER, LENGTH, ScriptedWorker, until
from .client import connection, counting
from .test_live_page import browser

CHROMIUM = shutil.which("chromium")
PHASE = worker_pb2.RequestProgress


def tell(worker: ScriptedWorker, attempt: int, phase: Any, **pages: int) -> None:
    """The worker says how far an attempt at 40 pages has come."""
    one = worker_pb2.RequestProgress(attempt=attempt, phase=phase, pages=40, **pages)
    worker.send(worker_pb2.AttachResponse(progress=worker_pb2.Progress(requests=[one])))


class Stream:
    """A viewer's stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.seen: list[list[dict[str, Any]]] = []

    async def next(self) -> list[dict[str, Any]]:
        """The next rows that are told."""
        async with asyncio.timeout(60):
            async for line in self._lines:
                if line == "event: progress":
                    data = await anext(self._lines)
                    self.seen.append(json.loads(data.removeprefix("data: ")))
                    return self.seen[-1]
        raise AssertionError("the stream has ended")

    async def until(self, **fields: Any) -> dict[str, Any]:
        """The row of the one request, once it is as that says."""
        while True:
            rows = await self.next()
            if rows and fields.items() <= rows[0].items():
                assert len(rows) == 1
                return rows[0]


async def in_hand_over(cluster: Cluster) -> tuple[Any, Any, int]:
    """A request that its workers do not answer yet; its call, its decode side's submission."""
    for worker in cluster.workers:
        worker.on_submit = None
    call = cluster.generate(request_id="walker", max_tokens=2)
    await cluster.prefill.submitted()
    submit = await cluster.decode.submitted()
    return call, submit, submit.attempt


async def test_a_request_is_shown_on_its_way(cluster: Cluster, http: httpx.AsyncClient) -> None:
    call, submit, attempt = await in_hand_over(cluster)
    async with http.stream("GET", "/live") as answer:
        stream = Stream(answer.aiter_lines())
        assert await stream.next() == []
        await until(lambda: all(worker.watched == [True] for worker in cluster.workers))
        tell(cluster.prefill, attempt, PHASE.PHASE_COMPUTING, written_pages=20, announced_pages=16)
        tell(cluster.decode, attempt, PHASE.PHASE_READING, pulled_pages=8, owned_pages=4)
        row = await stream.until(phase="reading")
        assert row == {
            "request_id": "walker", "attempt": attempt, "prefill": "prefill-0",
            "decode": "decode-0", "phase": "reading", "pages": 40, "written": 20,
            "announced": 16, "pulled": 8, "owned": 4, "output_tokens": 0,
        }  # fmt: skip
        tell(cluster.decode, attempt, PHASE.PHASE_DECODING, owned_pages=40, output_tokens=1)
        await stream.until(phase="decoding", owned=40, output_tokens=1)
        cluster.prefill.say(submit, 0, (4,), end=HANDED_OVER)
        cluster.decode.say(submit, 1, (5,), end=LENGTH)
        async for _ in call:
            pass
        while await stream.next():  # it is over, whatever the worker has said last
            pass
    await until(lambda: all(worker.watched == [True, False] for worker in cluster.workers))


async def test_nothing_is_sent_while_nothing_changes(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    async with http.stream("GET", "/live") as answer:
        events = 0
        async for line in answer.aiter_lines():
            events += line.startswith("event: progress")
            if line.startswith('data: {"model"'):
                events += 10
            if events >= 31:  # three seconds
                break
    assert events == 31


async def test_workers_are_told_again_after_a_break(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    async with http.stream("GET", "/live"):
        await until(lambda: cluster.decode.watched == [True])
        cluster.decode.break_stream()
        await until(lambda: cluster.decode.watched == [True, True])


async def test_viewers_are_bounded(cluster: Cluster, http: httpx.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(HTTP.methods["GET /live"].most or 0):
            answer = await stack.enter_async_context(http.stream("GET", "/live"))
            assert answer.status_code == 200
        async with http.stream("GET", "/live") as refused:
            assert refused.status_code == 429
            assert b"too many" in await refused.aread()
        assert cluster.decode.watched == [True]
    await until(lambda: cluster.decode.watched == [True, False])
    async with http.stream("GET", "/live") as answer:
        assert answer.status_code == 200


async def test_a_viewer_that_takes_nothing_is_dropped(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "_SECONDS", 0.01)
    # Events as large as those of many workers.
    config = replace(http_config, read_timeout=0.3, model_name="m" * (1 << 20))
    async with counting(config) as (cluster, _), connection(cluster, limit=1 << 10) as (_, writer):
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: cluster.decode.watched == [True])
        await until(lambda: cluster.decode.watched == [True, False])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_browser_shows_it(cluster: Cluster, scheme: str, tmp_path: Any) -> None:
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    _, _, attempt = await in_hand_over(cluster)
    async with browser(color_scheme=scheme) as page:
        await page.goto(f"http://{cluster.router.http_address}/")
        await until(lambda: all(worker.watched for worker in cluster.workers))
        row = page.locator("#progress .request")
        tell(cluster.prefill, attempt, PHASE.PHASE_COMPUTING, written_pages=20, announced_pages=16)
        tell(cluster.decode, attempt, PHASE.PHASE_READING, pulled_pages=8)
        await api.expect(row).to_have_text(
            "walker reading: 16 of 40 pages announced, 8 pulledprefill-0→decode-0"
        )
        prefill, decode = row.locator(".bar").nth(0), row.locator(".bar").nth(1)
        await api.expect(prefill).to_have_attribute("aria-label", "announced 16, computed 4 of 40")
        await api.expect(decode).to_have_attribute("aria-label", "owned 0, pulled 8 of 40")
        pulled = await decode.locator(".pulled").bounding_box()
        whole = await decode.bounding_box()
        assert pulled["width"] == pytest.approx(whole["width"] / 5, abs=2)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
        tell(cluster.decode, attempt, PHASE.PHASE_DECODING, owned_pages=40, output_tokens=3)
        await api.expect(row).to_contain_text("decoding: 40 pages owned, 3 tokens")
        await api.expect(decode).to_have_attribute("aria-label", "owned 40 of 40")
        assert page.errors == []
