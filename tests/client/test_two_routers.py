"""Two routers, each with workers that count slowly: one is killed in mid-stream."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, Diverged
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import worker_pb2
from kvrelay.wire.worker_info import WorkerRole
from tests.router.scripted_worker import ScriptedWorker, count_prefill, say_counted
from tests.router.toy_tokenizers import byte_level_tokenizer

from .router_processes import RouterProcess, ask_and_kill, router_processes, serving

PROMPT, LENGTH = [1, 2, 3], 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("one secret for all routers")
    return path


async def count_slowly(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    for position in range(1, submit.sampling_params.max_tokens):
        await asyncio.sleep(0.02)
        say_counted(worker, submit, position)


async def count_by_seed(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    """As a real one that samples: another seed, another output."""
    for position in range(1, submit.sampling_params.max_tokens):
        await asyncio.sleep(0.02)
        worker.say(submit, position, ((submit.sampling_params.seed + position) % 256,))


@asynccontextmanager
async def two_routers(
    model: Path, keys: list[Path]
) -> AsyncIterator[tuple[list[RouterProcess], list[ScriptedWorker]]]:
    """The decode workers, too."""
    async with AsyncExitStack() as stack:
        discoveries, decodes = [], []
        tokenizer = load_tokenizer(model).sha256
        for _ in keys:
            workers = [
                ScriptedWorker(f"{role}-0", role)
                for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
            ]
            for worker, answer in zip(workers, (count_prefill, count_slowly), strict=True):
                worker.model = dataclasses.replace(worker.model, tokenizer=tokenizer)
                worker.on_submit = answer
                await worker.start()
                stack.push_async_callback(worker.stop)
            discoveries.append(StaticDiscovery([worker.endpoint for worker in workers]))
            decodes.append(workers[1])
        routers = await stack.enter_async_context(router_processes(model, discoveries, keys))
        yield routers, decodes


async def test_a_stream_goes_on_when_its_router_is_killed(model: Path, key: Path) -> None:
    async with two_routers(model, [key, key]) as (routers, decodes):
        answer, killed_at = await ask_and_kill(routers, PROMPT, blocking=True, max_tokens=LENGTH)
        assert 0 < killed_at < LENGTH
        assert answer.token_ids == [(PROMPT[-1] + 1 + n) % 256 for n in range(LENGTH)]
        assert answer.text == byte_level_tokenizer().decode(answer.token_ids)
        assert answer.complete.usage.completion_tokens == LENGTH
        [first], [second] = (decode.submits for decode in decodes)
        assert first.request_id == second.request_id == answer.request_id
        assert first.sampling_params == second.sampling_params
        assert second.sampling_params.seed == answer.complete.seed


async def test_routers_with_keys_of_their_own_do_not_continue_each_others_streams(
    model: Path, key: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("another secret of its own")
    async with two_routers(model, [key, other]) as (routers, decodes):
        for decode in decodes:
            decode.on_submit = count_by_seed
        tokens: list[int] = []
        killed_at: list[int] = []

        async def ask(client: AsyncClient) -> None:
            async for response in client.generate(PROMPT, max_tokens=LENGTH):
                tokens.extend(response.delta.token_ids)
                if len(tokens) >= 5 and not killed_at:
                    killed_at.append(len(tokens))
                    await serving(client, routers).kill()

        async with AsyncClient([router.address for router in routers]) as client:
            with pytest.raises(Diverged, match="--seed-key-file"):
                await ask(client)
        assert killed_at
        assert len(tokens) < LENGTH, "nothing of the other one was delivered"
