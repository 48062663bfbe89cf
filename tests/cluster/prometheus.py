"""A real Prometheus that scrapes a cluster by its service discovery, with the shipped rules."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

RULES = Path(__file__).parents[2] / "deploy" / "charts" / "prometheus" / "rules.yml"
_PROGRAM = shutil.which("prometheus")
MISSING = "needs prometheus" if _PROGRAM is None else ""
"""Why none can be started; empty if one can."""
_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvrelay
    http_sd_configs: [{{url: "http://{controller}/sd", refresh_interval: 1s}}]
"""
_START_SECONDS = 60
_ANSWER_SECONDS = 30
_END_SECONDS = 30


class Prometheus:
    """Asks a running one, by its HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    async def ask(self, path: str, **query: str) -> Any:
        """The data of an answer; RuntimeError if it is an error."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        answer = json.loads(await asyncio.to_thread(_fetch, url))
        if answer["status"] != "success":
            raise RuntimeError(f"{url}: {answer}")
        return answer["data"]

    async def series(self, expr: str, seconds: float) -> list[list[float]]:
        """The values of each series that a query has had in the last seconds."""
        now = time.time()
        data = await self.ask(
            "query_range", query=expr, start=str(now - seconds), end=str(now), step="1"
        )
        return [[float(value) for _, value in one["values"]] for one in data["result"]]

    async def firing(self) -> dict[str, dict[str, str]]:
        """The labels of the alerts that fire, by name."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {
            one["labels"]["alertname"]: one["labels"] for one in alerts if one["state"] == "firing"
        }


@asynccontextmanager
async def scraping(controller: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Run one that scrapes the cluster of this controller every second.

    Args:
        controller: ``host:port`` of its metrics.
        folder: for the configuration, the data and the log.
    """
    assert _PROGRAM is not None
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(rules=RULES, controller=controller))
    command = [_PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--web.cors.origin=.*"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        prometheus = Prometheus(port)
        async with asyncio.timeout(_START_SECONDS):
            while not await _is_ready(prometheus):
                assert process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _END_SECONDS)
        finally:
            process.kill()


async def _is_ready(prometheus: Prometheus) -> bool:
    try:
        return "Ready" in await asyncio.to_thread(_fetch, f"{prometheus.url}/-/ready")
    except OSError:
        return False


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
        text: str = answer.read().decode()
        return text
