"""A session goes on at another router of the same workers, by the digest of its history."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.cluster.in_process import InProcess, in_process
from tests.cluster.test_sessions import FIRST, KINDS, NEW, Chat
from tests.pairwise import few


@asynccontextmanager
async def another_router(cluster: InProcess) -> AsyncIterator[InProcess]:
    """A second router of the same workers, until this context ends."""
    router = Router(cluster.router._config, cluster.discovery)
    await router.start()
    try:
        await router.wait_ready()
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield InProcess(stub, cluster.workers, cluster.hosted, router, cluster.discovery)
    finally:
        await router.stop()


async def adopt(cluster: InProcess, chat: Chat, digest: str) -> Chat:
    """The same conversation on another router."""
    request = pb.OpenSessionRequest(session_id=chat.name, history_digest=digest)
    answer = await cluster.stub.OpenSession(request)
    assert answer.tokens == len(chat.tokens)
    adopted = Chat(cluster, chat.name)
    adopted.tokens = list(chat.tokens)
    return adopted


@few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lives", [False, True], ids=["router lost", "router lives"])
async def test_a_session_goes_on_at_another_router(tiny: Path, kind: str, lives: bool) -> None:
    """Three turns, an adoption, a turn that finds the KV, and all again."""
    async with in_process(tiny, chunk_tokens=32, kv_memory=8 << 20, **KINDS[kind]) as cluster:
        async with another_router(cluster) as first:
            chat = await Chat(first, "chat").open()
            for new in (FIRST, NEW[0], NEW[1]):
                complete = await chat.say(new)
            digest = complete.history_digest
            assert digest == (await chat.state()).history_digest
            if lives:
                adopted = await adopt(cluster, chat, digest)
                assert (await chat.state()).tokens == len(chat.tokens), "it is there, too"
        if not lives:
            adopted = await adopt(cluster, chat, digest)
        found = (len(chat.tokens) - 1) // 16 * 16
        complete = await adopted.say(NEW[2])
        if kind == "aggregated":
            assert complete.usage.cached_tokens == found
        assert complete.history_digest != digest
        await adopted.close()
        await cluster.assert_at_baseline()


async def test_over_http(tiny: Path) -> None:
    async with in_process(tiny, kv_memory=8 << 20, **KINDS["aggregated"]) as cluster:
        async with another_router(cluster) as first:
            chat = await Chat(first, "chat").open()
            digest = (await chat.say(FIRST)).history_digest
        opened = await asyncio.to_thread(post, cluster, {"history_digest": digest})
        assert opened["tokens"] == len(chat.tokens)
        listed = await asyncio.to_thread(get, cluster)
        assert [(one["id"], one["history_digest"]) for one in listed["data"]] == [
            (opened["id"], digest)
        ]
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(post, cluster, {"history_digest": "3-" + 64 * "0"})
        assert refused.value.code == 404
        refused.value.close()


def post(cluster: InProcess, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{cluster.router.http_address}/v1/sessions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return dict(json.load(answer))


def get(cluster: InProcess) -> dict[str, Any]:
    url = f"http://{cluster.router.http_address}/v1/sessions"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return dict(json.load(answer))
