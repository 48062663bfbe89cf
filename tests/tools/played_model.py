"""A model that a scripted worker plays for a coding agent, and the run of an agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvrelay.router.config import PlacementMode, ReasoningFormat, RouterConfig
from kvrelay.v1 import worker_pb2
from tests.router.cluster import Cluster, running
from tests.router.http.test_tools import saying
from tests.router.scripted_worker import ScriptedWorker
from tests.router.toy_tokenizers import byte_level_tokenizer

TOKENIZER: Tokenizer = byte_level_tokenizer()


@asynccontextmanager
async def playing(
    folder: Path, template: str, says: Callable[[str], str], **changes: Any
) -> AsyncIterator[Cluster]:
    """A router with an HTTP door, whose worker says what follows from a prompt's text.

    Args:
        folder: for its files.
        template: of chats; a scripted worker has room for 512 tokens.
        says: returns an output.
        changes: of the router's configuration.
    """
    TOKENIZER.save(str(folder / "tokenizer.json"))
    written = folder / "template.jinja"
    written.write_text(template)
    config = RouterConfig(
        model_name="counter",
        model_path=folder,
        dtype="float32",
        placement=PlacementMode.DISAGGREGATED,
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        chat_template=written,
        reasoning_parser=ReasoningFormat.THINK,
        max_message_bytes=4 << 20,
        shutdown_grace_seconds=0.0,
        **changes,
    )

    async def play(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        prompt = TOKENIZER.decode(list(submit.input_ids))
        await saying(says(prompt), TOKENIZER)(worker, submit)

    async with running(config, "aggregated-0") as cluster:
        cluster.workers[0].on_submit = play
        yield cluster


def prompts_of(cluster: Cluster) -> list[str]:
    """The text of each prompt that its worker got."""
    return [TOKENIZER.decode(list(one.input_ids)) for one in cluster.workers[0].submits]


async def run_agent(
    command: Sequence[str | Path], folder: Path, settings: Mapping[str, str]
) -> str:
    """Runs an agent in a folder; returns what it printed, once it has ended well.

    Args:
        command: with its arguments.
        folder: where it works.
        settings: variables of its environment.
    """
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env={**os.environ, **settings},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said
    return said
