"""A cluster of the default model, as `kvrelay serve` runs it, for all tools."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from benchmarks.with_cluster import started
from kvrelay.v1 import inference_pb2_grpc
from tests.cluster.running import Cluster

ANYWHERE = "127.0.0.1:0"
MODEL = "smollm2-135m-instruct"
OPTIONS = ("--dtype", "float32", "--audit-pages", "--placement", "disaggregated")
"""Whatever is asked for is handed over, and computed as transformers computes it."""


@dataclass
class Served(Cluster):
    """The running cluster, and the tools that call it."""

    http: str
    """Its URL, without a path."""
    model_path: Path
    """Where its weights and its tokenizer are."""

    @property
    def metrics_addresses(self) -> list[str]:
        """Nobody looks at them here."""
        raise NotImplementedError

    async def run(
        self, command: Sequence[str | Path], folder: Path, *, offline: bool = True
    ) -> str:
        """Runs a tool in a folder of its own; returns what it printed, once it has ended well.

        Args:
            command: with its arguments.
            folder: its home, too.
            offline: tells it so; aiperf 0.13 then takes a tokenizer's path for a name on a hub.
        """
        told = OFFLINE if offline else {}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=folder,
            env={**os.environ, "HOME": str(folder), **USUAL, **told},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said = (await process.communicate())[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said[-8000:]
        return said


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
USUAL = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
async def served() -> AsyncIterator[Served]:
    said = io.StringIO()
    doors = [f"--{door}={ANYWHERE}" for door in ("grpc", "http", "admin", "metrics")]
    with started([*doors, *OPTIONS], said) as cluster:
        lines = r"^  model +(\S+)$.*^  HTTP +(http://\S+)$"
        found = re.search(lines, said.getvalue(), re.MULTILINE | re.DOTALL)
        assert found, said.getvalue()
        async with grpc.aio.insecure_channel(cluster.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield Served(stub, found[2], Path(found[1]))
