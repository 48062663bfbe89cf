"""What belongs to a token: its requests, its tenant's prefixes, its priorities."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.router.access.auth import bearer
from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import END, until

TOKENS = """
[[token]]
name = "alice"
token = "alpha"
tenant = "acme"

[[token]]
name = "bob"
token = ["beta", "beta-new"]
rights = ["generate", "priorities"]
tenant = "acme"

[[token]]
name = "carol"
token = "gamma"
"""


@pytest.fixture
async def cluster(config: RouterConfig, tmp_path: Path) -> AsyncIterator[Cluster]:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with running(replace(config, auth_token_file=path), "prefill-0", "decode-0") as cluster:
        yield cluster


def generate(cluster: Cluster, token: str, **fields: Any) -> Any:
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(max_tokens=4),
        **fields,
    )
    return cluster.stub.Generate(request, metadata=bearer(token))


async def abort(cluster: Cluster, token: str, request_id: str) -> bool:
    request = pb.AbortRequest(request_id=request_id)
    answer = await cluster.stub.Abort(request, metadata=bearer(token))
    return bool(answer.aborted)


async def test_one_id_of_two_tokens_is_two_requests(cluster: Cluster) -> None:
    calls = [generate(cluster, token, request_id="mine") for token in ("alpha", "gamma")]
    alice, carol = [await cluster.prefill.submitted(number) for number in (1, 2)]
    assert alice.request_id == carol.request_id == "mine"
    assert alice.attempt != carol.attempt
    whose = [one.namespace for one in (alice, carol)]
    assert sorted(whose) == ["acme/", "carol/"]
    if whose[0] == "carol/":
        alice, carol = carol, alice
    length = END(reason=END.REASON_LENGTH)
    cluster.prefill.say(alice, 0, (4, 5, 6, 7), end=length)
    cluster.prefill.say(carol, 0, (40, 50, 60, 70), end=length)
    assert (await collect(calls[0])).token_ids == [4, 5, 6, 7]
    assert (await collect(calls[1])).token_ids == [40, 50, 60, 70]


async def test_a_body_of_another_token_is_no_conflict(cluster: Cluster) -> None:
    """ALREADY_EXISTS would tell that the id is in use."""
    call = generate(cluster, "alpha", request_id="mine")
    await cluster.prefill.submitted()
    own = await status_of(generate(cluster, "alpha", request_id="mine", cache_salt="x"))
    assert own.code() is grpc.StatusCode.ALREADY_EXISTS
    cluster.count()
    other = await collect(generate(cluster, "gamma", request_id="mine", cache_salt="x"))
    assert other.token_ids == [4, 5, 6, 7]
    call.cancel()


async def test_nobody_aborts_the_request_of_another(cluster: Cluster) -> None:
    call = generate(cluster, "beta", request_id="mine")
    submit = await cluster.prefill.submitted()
    cluster.prefill.say(submit, 0, (4,))
    assert await read(call, 1) == [(0, 4)]
    assert not await abort(cluster, "alpha", "mine")  # of the same tenant
    assert not await abort(cluster, "gamma", "mine")
    assert not cluster.prefill.cancels
    assert await abort(cluster, "beta-new", "mine")
    await until(lambda: bool(cluster.prefill.cancels))
    ended = (await call.read()).complete
    assert ended.finish_reason == pb.FINISH_REASON_ABORT
    assert not await abort(cluster, "beta", "mine")


async def test_a_second_reader_must_have_the_same_token(cluster: Cluster) -> None:
    first = generate(cluster, "beta", request_id="mine")
    await cluster.prefill.submitted()
    second = generate(cluster, "beta-new", request_id="mine")
    third = generate(cluster, "gamma", request_id="mine")
    await cluster.prefill.submitted(2)
    mine, other = cluster.prefill.submits
    assert (mine.namespace, other.namespace) == ("acme/", "carol/")
    cluster.prefill.say(mine, 0, (4,))
    assert await read(first, 1) == await read(second, 1) == [(0, 4)]
    for call in (first, second, third):
        call.cancel()


async def test_tenant_and_salt_name_the_part_of_the_prefix_index(cluster: Cluster) -> None:
    cluster.count()
    for token, salt in (("alpha", ""), ("beta", ""), ("beta", "x"), ("gamma", "x")):
        await collect(generate(cluster, token, cache_salt=salt))
    for worker in (cluster.prefill, cluster.decode):
        namespaces = [submit.namespace for submit in worker.submits]
        assert namespaces == ["acme/", "acme/", "acme/x", "carol/x"]


async def test_a_salt_is_bounded(cluster: Cluster) -> None:
    cluster.count()
    await collect(generate(cluster, "alpha", cache_salt="x" * 128))
    refused = await status_of(generate(cluster, "alpha", cache_salt="x" * 129))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.details() == "cache_salt: must have at most 128 bytes, got 129"


async def test_going_before_others_takes_a_right(cluster: Cluster) -> None:
    cluster.count()
    refused = await status_of(generate(cluster, "alpha", priority=-1))
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    assert refused.details() == (
        "priority: the token alice lacks the right priorities (rights in --auth-token-file)"
    )
    for token, priority in (("alpha", 0), ("alpha", 5), ("beta", -1)):
        await collect(generate(cluster, token, priority=priority))
    assert [submit.priority for submit in cluster.prefill.submits] == [0, 5, -1]
    assert await cluster.metric('kvrelay_requests_total{model="counter",outcome="denied"}') == 1


async def test_without_tokens_everybody_is_the_same_caller(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0") as cluster:
        first = generate(cluster, "alpha", request_id="mine", priority=-1)
        submit = await cluster.prefill.submitted()
        assert submit.namespace == "/"
        assert await abort(cluster, "gamma", "mine")
        first.cancel()
