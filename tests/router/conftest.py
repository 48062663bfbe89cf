from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery, WorkerRole
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2_grpc

from .cluster import Cluster
from .scripted_worker import ScriptedWorker
from .toy_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


@pytest.fixture(scope="session")
def model_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def config(model_path: Path) -> RouterConfig:
    return RouterConfig(
        model_name="counter",
        model_path=model_path,
        dtype="float32",
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        default_max_tokens=16,
        max_live_requests=8,
        max_message_bytes=64 << 10,
        shutdown_grace_seconds=0.0,
    )


@pytest.fixture
async def cluster(config: RouterConfig) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        workers = [
            ScriptedWorker("prefill-0", WorkerRole.PREFILL),
            ScriptedWorker("decode-0", WorkerRole.DECODE),
        ]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        discovery = StaticDiscovery([worker.endpoint for worker in workers])
        router = Router(config, discovery)
        await router.start()
        stack.push_async_callback(router.stop)
        await asyncio.wait_for(router.wait_ready(), 5)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(
                router.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
        )
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Cluster(router, discovery, *workers, channel, stub)
