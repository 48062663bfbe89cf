"""The examples and the README's client, run as they are against a real cluster.

`test_locked_cluster.py` runs the one with TLS and tokens.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.deploy.options.listen_address import DEFAULT_GRPC
from tests.cluster.commands import example, python
from tests.cluster.in_process import InProcess, in_process

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
async def cluster(tiny: Path) -> AsyncIterator[InProcess]:
    async with in_process(tiny, kv_memory=64 << 20) as cluster:
        yield cluster


@pytest.fixture
def server(cluster: InProcess) -> str:
    return cluster.router.grpc_address


async def test_generate(cluster: InProcess, server: str):
    *_, last = (await example("generate.py", server)).splitlines()
    assert re.fullmatch(r"FINISH_REASON_(STOP|LENGTH): \d+ tokens, \d\.\d{3} s in prefill", last)
    await cluster.assert_at_baseline()


async def test_generate_async(cluster: InProcess, server: str):
    lines = (await example("generate_async.py", server)).splitlines()
    assert [line.split("|")[0] for line in lines] == [
        "The capital of France is",
        "Water boils at",
        "The quick brown fox",
    ]
    await cluster.assert_at_baseline()


async def test_abort(cluster: InProcess, server: str):
    told = await example("abort.py", server)
    ended = re.fullmatch(r"aborted: True\nFINISH_REASON_ABORT after (\d+) tokens\n", told)
    assert ended, told
    assert 1 <= int(ended[1]) < 2000
    await cluster.assert_at_baseline()


async def test_client(cluster: InProcess, server: str):
    *_, second, third = (await example("client.py", server)).splitlines()
    assert {line.split("|")[0] for line in (second, third)} == {"Water boils at"}
    assert second != third
    await cluster.assert_at_baseline()


async def test_retry_with_the_same_id(cluster: InProcess, server: str):
    _, second, third = (await example("retry.py", server)).splitlines()
    assert second.removeprefix("the second one saw ") == third.removeprefix(
        "and a third one, later, "
    )
    await cluster.assert_at_baseline()


async def test_several_outputs(cluster: InProcess, server: str):
    lines = (await example("several_outputs.py", server)).splitlines()
    assert len(lines) == len(set(lines)) == 3
    await cluster.assert_at_baseline()


async def test_the_readmes_client(cluster: InProcess, server: str, tmp_path: Path):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert str(DEFAULT_GRPC) in code
    client = tmp_path / "client.py"
    client.write_text(code.replace(str(DEFAULT_GRPC), server))
    done = await python(client)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    await cluster.assert_at_baseline()
