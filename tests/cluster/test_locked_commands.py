"""Every command of an operator, on clusters that ask for certificates and tokens."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.net.tls import TlsFiles
from tests.certificates import Authority
from tests.cluster.commands import kvrelay
from tests.cluster.test_controller_outage import name as name  # a fixture
from tests.cluster.test_locked_cluster import OPERATOR, TOKEN, TOKENS

pytestmark = pytest.mark.slow
SECONDS = 120


@dataclass(frozen=True)
class Keys:
    """Of two clusters and their router."""

    tls: TlsFiles
    tokens: Path
    """What the doors let in."""
    operators: Path
    """Has a token with the right admin."""
    friends: Path
    """Has one without it."""

    @property
    def doors(self) -> list[str]:
        """How a door is locked."""
        tls = (f"--tls-{one}={getattr(self.tls, one)}" for one in ("cert", "key", "ca"))
        return [*tls, f"--auth-token-file={self.tokens}"]

    @property
    def operator(self) -> list[str]:
        return [f"--ca={self.tls.ca}", f"--token-file={self.operators}"]

    @property
    def friend(self) -> list[str]:
        return [f"--ca={self.tls.ca}", f"--token-file={self.friends}"]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    paths = [tmp_path / one for one in ("tokens.toml", "operators", "friends")]
    for path, text in zip(paths, (TOKENS, OPERATOR, TOKEN), strict=True):
        path.write_text(text)
    return Keys(Authority(tmp_path / "tls").issue(), *paths)


@pytest.fixture
def clusters(name: str) -> Iterator[list[list[str]]]:
    """How commands are told of two clusters, which are ended."""
    head = ray_module.get_runtime_context().gcs_address
    both = [["--ray-address", head, "--cluster-name", one] for one in (name, f"{name}b")]
    yield both
    for where in both:
        command = [sys.executable, "-m", "kvrelay.deploy", "down", *where]
        subprocess.run(command, capture_output=True, check=False)


async def succeeds(*words: str) -> str:
    """What a command prints, which must succeed."""
    done = await kvrelay(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def controller_of(where: list[str], options: list[str]) -> list[str]:
    """Start a cluster; where its controller listens, as commands are told it."""
    found = re.search(r"controller +(\S+)", await succeeds("up", *where, *options))
    assert found
    return ["--controller", found[1]]


@asynccontextmanager
async def routing(where: list[str], keys: Keys, model: Path) -> AsyncIterator[str]:
    """The gRPC address of a router that follows a cluster, in a process of its own."""
    anywhere = [f"--{one}=127.0.0.1:0" for one in ("grpc", "http", "metrics")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.deploy", "router", *where, *keys.operator, *keys.doors),
        *("--model", str(model), "--dtype", "float32", *anywhere),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = await process.stdout.readuntil(b"Ctrl-C stops it.")
        found = re.search(rb"gRPC +(\S+)", said)
        assert found
        yield found[1].decode()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def refused(*words: str) -> str:
    """Why a command was refused."""
    done: CompletedProcess[str] = await kvrelay(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


async def workers_of(controller: list[str], keys: Keys) -> dict[str, int]:
    """The revisions of its workers, by name."""
    state = json.loads(await succeeds("status", "--json", *controller, *keys.operator))
    assert {one["phase"] for one in state["workers"]} <= {"live"}
    return {one["name"]: one["revision"] for one in state["workers"]}


async def test_operators_are_obeyed_and_nobody_else(
    tiny: Path, keys: Keys, clusters: list[list[str]]
):
    options = ["--model", str(tiny), "--dtype=float32", "--kv-memory=4MiB", "--threads=1"]
    options += ["--advertise=127.0.0.1", "--metrics=127.0.0.1:0", "--drain-grace=0.01", *keys.doors]
    first, second = clusters
    async with asyncio.timeout(SECONDS):
        old, new = await asyncio.gather(*(controller_of(one, options) for one in clusters))
        async with routing(first, keys, tiny) as server:
            at_router = [f"--server={server}", *keys.friend]
            generate = ("generate", "the quick brown fox", "--max-tokens=4", *at_router)
            assert await succeeds(*generate)
            assert "prefill-0" in await succeeds("status", *at_router)
            shift = ("shift", "--to", new[1], "--drain")
            grow = ("scale", "--decode=2")
            roll = ("roll", "--set=chunk-tokens=16")
            for_operators = [("status",), grow, ("drain", "decode-0"), roll, shift]
            errors = await asyncio.gather(
                *(refused(*words, *old, *keys.friend) for words in for_operators),
                refused(*grow, *old, keys.operator[0]),
                refused(*grow, *old),
            )
            reasons = [one.split(": ")[2] for one in errors]
            assert reasons == [
                *["PERMISSION_DENIED"] * len(for_operators),
                "UNAUTHENTICATED",
                "UNAVAILABLE",
            ]

            told = [*old, *keys.operator]
            assert "decode-1 is ready" in await succeeds(*grow, *first, *keys.operator)
            assert "decode-1 has left" in await succeeds("drain", "decode-1", "--remove", *told)
            assert "prefill-0 has left" in await succeeds(*roll, *told)
            assert await workers_of(old, keys) == {"decode-2": 1, "prefill-1": 1}
            assert await succeeds(*generate)

            said = await succeeds(*shift, *told)
            assert f"New requests of all 1 routers go to the workers of {new[1]}." in said
            assert {"decode-2 has left", "prefill-1 has left"} <= {
                line.partition("  (")[0] for line in said.splitlines()
            }
            assert await workers_of(old, keys) == {}
            assert await workers_of(new, keys) == {"decode-0": 0, "prefill-0": 0}
            assert await succeeds(*generate)
            for where in clusters:
                assert "has ended" in await succeeds("down", *where)
    assert "has no controller" in await refused("status", *second, *keys.operator)
