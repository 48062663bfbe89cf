"""What one tenant has computed, no other finds, nor learns of: with real workers and a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.router.access.auth import bearer
from kvrelay.v1 import inference_pb2 as pb
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster

TOKENS = """
[[token]]
name = "alice"
token = "alpha"
tenant = "acme"
[[token]]
name = "bob"
token = "beta"
tenant = "acme"
[[token]]
name = "carol"
token = "gamma"
"""
PROMPT = list(range(3, 100))


async def test_cached_tokens_tell_nothing_of_other_tenants(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with in_process(tiny, auth_token_file=path, page_size=16, kv_memory=8 << 20) as cluster:
        first, tokens = await ask(cluster, "alpha")
        assert first == 0
        for token, salt, expected in (
            ("gamma", "", 0),  # another tenant
            ("gamma", "", 96),  # has now computed it itself
            ("beta", "", 96),  # of the same tenant
            ("beta", "x", 0),  # apart by its own choice
            ("alpha", "x", 96),
            ("gamma", "x", 0),  # who guesses the salt is another tenant still
            ("alpha", "y", 0),
        ):
            assert await ask(cluster, token, salt) == (expected, tokens), (token, salt)
        for worker in cluster.workers:
            hits = await cluster.metric("kvrelay_prefix_hits_total", worker=worker.name)
            assert hits == 3, worker.name


async def ask(cluster: Cluster, token: str, salt: str = "") -> tuple[int, list[int]]:
    """How many of the prompt's tokens were cached, and the output."""
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=PROMPT),
        sampling_params=pb.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        cache_salt=salt,
    )
    tokens: list[int] = []
    complete: Any = None
    async for response in cluster.stub.Generate(request, metadata=bearer(token)):
        tokens += response.delta.token_ids
        complete = response.complete
    return complete.usage.cached_tokens, tokens
