"""A token's own limits: what they refuse, with which hint, and what they leave to others."""

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

from .cluster import Cluster, HeldEncoding, collect, read, running, status_of
from .scripted_worker import LENGTH, until

TOKENS = """
[[token]]
name = "few"
token = "alpha"
max_live_requests = 2

[[token]]
name = "short"
token = "beta"
max_queued_prompt_tokens = 10

[[token]]
name = "free"
token = "gamma"
"""


@pytest.fixture
def guarded(config: RouterConfig, tmp_path: Path) -> RouterConfig:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    return replace(config, auth_token_file=path)


@pytest.fixture
async def cluster(guarded: RouterConfig) -> AsyncIterator[Cluster]:
    async with running(guarded, "prefill-0", "decode-0") as cluster:
        yield cluster


def generate(cluster: Cluster, token: str, tokens: int = 3, **fields: Any) -> Any:
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=range(1, tokens + 1)),
        sampling_params=pb.SamplingParams(max_tokens=4),
        **fields,
    )
    return cluster.stub.Generate(request, metadata=bearer(token))


async def refused(cluster: Cluster, token: str, tokens: int, limit: str) -> str:
    """The message, after a look at the status, the hint and the metrics."""
    before = await cluster.metric("kvrelay_token_refusals_total")
    error = await status_of(generate(cluster, token, tokens))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after-ms", "500") in tuple(error.trailing_metadata() or ())
    details = error.details() or ""
    name = {"alpha": "few", "beta": "short"}[token]
    assert f"the token {name} may have no more ({limit} in --auth-token-file)" in details
    assert await cluster.metric("kvrelay_token_refusals_total") == before + 1
    line = f'kvrelay_token_refusals_total{{limit="{limit}",model="counter",token="{name}"}}'
    assert await cluster.metric(line) > 0
    return details


async def test_live_requests_of_a_token_are_bounded(cluster: Cluster) -> None:
    calls = [generate(cluster, "alpha", request_id=name) for name in "ab"]
    first, second = [await cluster.prefill.submitted(number) for number in (1, 2)]
    details = await refused(cluster, "alpha", 3, "max_live_requests")
    assert details.startswith("2 requests are live, of 2: ")
    joined = generate(cluster, "alpha", request_id="a")  # is no request more
    others = [generate(cluster, "gamma") for _ in range(3)]
    await cluster.prefill.submitted(5)
    for submit in (first, second):
        cluster.prefill.say(submit, 0, (4,), end=LENGTH)
    for call in (*calls, joined):
        assert (await collect(call)).token_ids == [4]
    again = generate(cluster, "alpha")
    await cluster.prefill.submitted(6)
    for call in (again, *others):
        call.cancel()
    assert await cluster.metric('kvrelay_requests_total{model="counter",outcome="limited"}') == 1


async def test_requests_count_while_they_are_validated(
    guarded: RouterConfig, held_encoding: HeldEncoding
) -> None:
    async with running(guarded, "prefill-0", "decode-0") as cluster:
        cluster.count()
        request = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(max_tokens=4))
        calls = [cluster.stub.Generate(request, metadata=bearer("alpha")) for _ in range(2)]
        await until(lambda: len(held_encoding.texts) == 2)
        await refused(cluster, "alpha", 3, "max_live_requests")
        held_encoding.let_go.set()
        for call in calls:
            assert len((await collect(call)).token_ids) == 4


async def test_prompt_tokens_that_wait_are_bounded(cluster: Cluster) -> None:
    """Until the first token comes; whoever streams has left the queue."""
    first = generate(cluster, "beta", 6)
    submit = await cluster.prefill.submitted()
    details = await refused(cluster, "beta", 5, "max_queued_prompt_tokens")
    assert details.startswith("prompts of 6 tokens wait, of 10, and 5 would come: ")
    fits = generate(cluster, "beta", 4)
    await cluster.prefill.submitted(2)
    # As much waits as may: this is known before a prompt is tokenized.
    details = await refused(cluster, "beta", 1, "max_queued_prompt_tokens")
    assert details.startswith("prompts of 10 tokens wait, of 10, and 1 would come: ")
    other = generate(cluster, "gamma", 20)
    await cluster.prefill.submitted(3)
    cluster.prefill.say(submit, 0, (4,))
    assert await read(first, 1) == [(0, 4)]
    now = generate(cluster, "beta", 6)
    await cluster.prefill.submitted(4)
    for call in (first, fits, other, now):
        call.cancel()


async def test_a_prompt_that_never_fits_is_no_matter_of_time(cluster: Cluster) -> None:
    error = await status_of(generate(cluster, "beta", 11))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "input_ids: the prompt has 11 tokens, and the token short may queue 10 "
        "(max_queued_prompt_tokens in --auth-token-file)"
    )
    assert "retry-after-ms" not in dict(error.trailing_metadata() or ())
    assert not cluster.prefill.submits


async def test_refused_requests_leave_nothing_behind(cluster: Cluster) -> None:
    """What is invalid, over a limit or aborted counts no longer."""
    for _ in range(3):
        invalid = await status_of(generate(cluster, "alpha", tokens=0))
        assert invalid.code() is grpc.StatusCode.INVALID_ARGUMENT
    calls = [generate(cluster, "alpha") for _ in range(2)]
    await cluster.prefill.submitted(2)
    await refused(cluster, "alpha", 3, "max_live_requests")
    for call in calls:
        call.cancel()
    await until(lambda: len(cluster.prefill.cancels) == 2)
    cluster.count()
    for _ in range(3):
        assert len((await collect(generate(cluster, "alpha"))).token_ids) == 4
