"""The live page: what the door says, and what a real browser shows."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.router.config import RouterConfig

from ..cluster import Cluster, collect
from .client import counting

TOKENS = """
[[token]]
name = "client"
token = "alpha-alpha-alpha-alpha"
rights = ["generate"]
[[token]]
name = "operator"
token = "omega-omega-omega-omega"
rights = ["admin"]
"""


def bearer_of(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


CHROMIUM = shutil.which("chromium")


async def first_event(http: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    async with http.stream("GET", "/live", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event
    raise AssertionError("no event")


async def test_the_stream_tells_what_server_info_does(cluster: Cluster, http: httpx.AsyncClient):
    await collect(cluster.generate(request_id="a"))
    event = await first_event(http)
    assert (event["model"], event["requests"]["ended"]) == ("counter", {"length": "1"})
    assert event["requests"]["output_tokens"] == "8"
    assert [worker["worker"] for worker in event["workers"]] == ["decode-0", "prefill-0"]
    assert event["workers"][0]["load"]["pools"][0]["free"] == "64"


async def test_the_page_is_one_file_that_calls_nobody_else(http: httpx.AsyncClient):
    answer = (await http.get("/")).raise_for_status()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)\s*=|https?://|@import|url\(""", answer.text)
    assert (await http.head("/")).status_code == 200
    assert (await http.head("/live")).status_code == 405, "it would have no end"


async def test_the_page_is_for_all_and_what_it_shows_for_admins(
    http_config: RouterConfig, tmp_path: Path
):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with counting(replace(http_config, auth_token_file=path)) as (_, http):
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/live")).status_code == 401
        refused = await http.get("/live", headers=bearer_of("alpha-alpha-alpha-alpha"))
        assert refused.status_code == 403
        event = await first_event(http, **bearer_of("omega-omega-omega-omega"))
        assert event["model"] == "counter"


async def test_a_router_that_stops_does_not_wait_for_the_page(http_config: RouterConfig):
    async with counting(http_config) as (cluster, http), http.stream("GET", "/live") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        stopping = asyncio.create_task(cluster.router.stop())
        async with asyncio.timeout(60):
            _ = [line async for line in lines]
            await stopping


@asynccontextmanager
async def browser(**options: Any) -> AsyncIterator[Any]:
    """A page of Chromium, the window of a phone unless told otherwise."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with api.async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await chromium.new_page(**{"viewport": {"width": 360, "height": 740}, **options})
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on(
                "console",
                lambda said: errors.append(said.text) if said.type == "error" else None,
            )
            page.errors = errors
            yield page
        finally:
            await chromium.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_browser_shows_the_cluster(cluster: Cluster, scheme: str, tmp_path: Path):
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with browser(color_scheme=scheme) as page:
        await page.goto(f"http://{cluster.router.http_address}/")
        await api.expect(page.locator("#model")).to_have_text("counter")
        await api.expect(page.locator("#workers h2")).to_have_text(
            ["decode-0 ready", "prefill-0 ready"]
        )
        await api.expect(page.locator("#ended")).to_have_text("ended: none")
        await collect(cluster.generate(request_id="a"))
        await api.expect(page.locator("#ended")).to_have_text("ended: length 1")
        # Wide enough for a phone, the bar as wide as the page, and no problem said.
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        bar = await page.locator("#workers .bar").first.bounding_box()
        assert bar["width"] > 300
        await api.expect(page.locator("#problem")).to_be_hidden()
        await page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
        assert page.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
async def test_a_browser_asks_for_a_token(http_config: RouterConfig, tmp_path: Path):
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with (
        counting(replace(http_config, auth_token_file=path)) as (cluster, _),
        browser() as page,
    ):
        await page.goto(f"http://{cluster.router.http_address}/")
        await page.locator("#token").fill("alpha-alpha-alpha-alpha")
        await page.get_by_role("button").click()
        await api.expect(page.locator("#problem")).to_have_text(
            "This token may not see the cluster."
        )
        await page.locator("#token").fill("omega-omega-omega-omega")
        await page.get_by_role("button").click()
        await api.expect(page.locator("#model")).to_have_text("counter")
        await api.expect(page.locator("#ask")).to_be_hidden()
