"""The grammars of live requests have a bound, of one token and of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.router.access.auth import bearer
from kvrelay.router.config import RouterConfig
from kvrelay.text.grammar import LEAST_BYTES
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect, running, status_of
from .http.client import PROMPT, with_http
from .scripted_worker import LENGTH

TOKENS = f"""
[[token]]
name = "few"
token = "alpha"
max_grammar_bytes = {2 * LEAST_BYTES}

[[token]]
name = "free"
token = "gamma"
"""
MANY = [f"{number}" for number in range(1000)]
"""As alternatives of one grammar: more than three small ones."""


@pytest.fixture
async def cluster(config: RouterConfig, tmp_path: Path) -> AsyncIterator[Cluster]:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    config = with_http(config, tmp_path, max_grammar_bytes=3 * LEAST_BYTES)
    async with running(replace(config, auth_token_file=path), "prefill-0", "decode-0") as cluster:
        yield cluster


def generate(cluster: Cluster, token: str, choice: str | list[str]) -> Any:
    wanted = pb.StructuredOutput(choice=choice)
    params = pb.SamplingParams(max_tokens=4, structured_output=wanted)
    request = pb.GenerateRequest(input_ids=pb.TokenIds(ids=[1, 2]), sampling_params=params)
    return cluster.stub.Generate(request, metadata=bearer(token))


async def test_grammars_of_live_requests_are_bounded(cluster: Cluster) -> None:
    calls, submits = [], []
    for token, choice in (("alpha", "a"), ("alpha", "b"), ("alpha", "a"), ("gamma", "b")):
        calls.append(generate(cluster, token, choice))  # equal ones count once
        submits.append(await cluster.prefill.submitted(len(calls)))
    own = await status_of(generate(cluster, "alpha", "c"))
    assert own.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_grammar_bytes in --auth-token-file" in (own.details() or "")
    calls.append(generate(cluster, "gamma", "c"))
    submits.append(await cluster.prefill.submitted(5))
    full = await status_of(generate(cluster, "gamma", "d"))
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-grammar-bytes" in (full.details() or "")
    assert ("retry-after-ms", "500") in tuple(full.trailing_metadata() or ())
    for call, submit in zip(calls, submits, strict=True):
        cluster.prefill.say(submit, 0, (4,), end=LENGTH)
        assert (await collect(call)).token_ids == [4]
    last = generate(cluster, "gamma", "d")
    await cluster.prefill.submitted(6)
    last.cancel()


@pytest.mark.parametrize(
    ("token", "limit"), [("alpha", "max_grammar_bytes in"), ("gamma", "--max-grammar-bytes")]
)
async def test_a_grammar_that_never_fits_is_no_matter_of_time(
    cluster: Cluster, token: str, limit: str
) -> None:
    url = f"http://{cluster.router.http_address}/v1/completions"
    headers = {"authorization": f"Bearer {token}"}
    body = {**PROMPT, "structured_outputs": {"choice": MANY}}
    async with httpx.AsyncClient() as http:
        answer = await http.post(url, json=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "structured_outputs.choice")
    assert limit in error["message"]
    assert not cluster.prefill.submits
