"""schemathesis, unchanged, tries what the OpenAPI document allows and what it does not."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.in_process import in_process

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
ENDLESS = "/live"
"""A stream that ends with its client alone."""


async def attack(tmp_path: Path, phase: str, examples: int) -> int:
    """Let it call a router of a tiny model; returns how many calls it made."""
    model = await asyncio.to_thread(make_checkpoint, tmp_path / "llama")
    async with in_process(model, default_max_tokens=4) as cluster:
        await cluster.assert_at_baseline()
        url = f"http://{cluster.router.http_address}/openapi.json"
        report = tmp_path / "said.txt"
        with report.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", url, "--phases", phase),
                *("--checks", ",".join(CHECKS), "--max-examples", str(examples), "--seed", "1"),
                *("--exclude-path", ENDLESS, "--request-timeout", "60", "--no-color"),
                cwd=tmp_path,
                stdout=out,
                stderr=out,
            )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = report.read_text()
        assert process.returncode == 0, said[-8000:]
        await cluster.assert_at_baseline()
        assert (await cluster.generate([1, 2, 3], max_tokens=2)).complete is not None
        found = re.search(r"Test cases:\s+(\d+) generated", said)
        assert found, said
        return int(found[1])


@pytest.mark.slow  # `test_fuzz.py` and `test_openapi.py` of `tests/router/http` send bodies, too
async def test_a_few_calls(tmp_path: Path) -> None:
    assert await attack(tmp_path, "fuzzing", 5) > 20


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "examples", "calls"),
    [("coverage", 300, 1000), ("fuzzing", 150, 500), ("stateful", 300, 100)],
)
async def test_many_calls(tmp_path: Path, phase: str, examples: int, calls: int) -> None:
    assert await attack(tmp_path, phase, examples) > calls
