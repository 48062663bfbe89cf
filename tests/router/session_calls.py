"""Calls of a session's client on a scripted cluster; the session is `chat` unless it is named."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from .cluster import Cluster, Streamed, collect


async def opened(cluster: Cluster, **fields: Any) -> str:
    request = pb.OpenSessionRequest(session_id="chat", **fields)
    return str((await cluster.stub.OpenSession(request)).session_id)


def turn(cluster: Cluster, *ids: int, max_tokens: int = 2, n: int = 1, **fields: Any) -> Any:
    fields = {"session_id": "chat", **fields}
    metadata = fields.pop("metadata", None)
    params = pb.SamplingParams(max_tokens=max_tokens, n=n)
    request = pb.GenerateRequest(input_ids=pb.TokenIds(ids=ids), sampling_params=params, **fields)
    return cluster.stub.Generate(request, metadata=metadata)


async def said(cluster: Cluster, *ids: int, **fields: Any) -> Streamed:
    return await collect(turn(cluster, *ids, **fields))


async def state(cluster: Cluster) -> pb.SessionState:
    session: pb.SessionState
    [session] = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
    return session


async def until_idle(cluster: Cluster) -> pb.SessionState:
    while (session := await state(cluster)).running:
        await asyncio.sleep(0.005)
    return session


def submits(cluster: Cluster) -> list[worker_pb2.SubmitRequest]:
    return sorted((s for w in cluster.workers for s in w.submits), key=lambda s: s.attempt)


async def status_of_open(
    cluster: Cluster, name: str, metadata: Any = None, **fields: Any
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.OpenSession(
            pb.OpenSessionRequest(session_id=name, **fields), metadata=metadata
        )
    return caught.value
