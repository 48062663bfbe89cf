"""The commands that are clients of the HTTP door, with the real door."""

from __future__ import annotations

import httpx

from kvrelay.deploy.commands.conversation import Conversation
from kvrelay.deploy.load_generator.load_report import Slo
from kvrelay.deploy.load_generator.measurement import RunBounds, bench_http
from kvrelay.deploy.load_generator.workload import ClosedLoop, Shape, fixed_workloads
from kvrelay.deploy.reach.grpc_target import OPEN
from kvrelay.deploy.reach.http_target import HttpTarget

from ..cluster import Cluster


async def test_bench_over_http(cluster: Cluster) -> None:
    workloads = fixed_workloads([Shape(3, 8)], [ClosedLoop(2)], 4, seed=0)
    target = HttpTarget.parse(f"http://{cluster.router.http_address}/v1")
    results = await bench_http(target, 50, workloads, RunBounds(30, 20, 1), Slo())
    [run] = results.runs
    assert (run.report.requests.completed, run.report.output_tokens) == (4, 32)
    assert results.server["model"] == "counter"


async def test_a_conversation(cluster: Cluster, http: httpx.AsyncClient) -> None:
    target = HttpTarget.parse(f"http://{cluster.router.http_address}")
    pieces: list[tuple[str, bool]] = []
    conversation = Conversation({"max_completion_tokens": 8}, "Count.")
    conversation.model = "counter"
    async with target.session(OPEN) as session:
        for message in ("on", "and on"):
            await conversation.ask(
                session,
                target.url,
                message,
                lambda text, reasoning: pieces.append((text, reasoning)),
            )
    asked = conversation.messages[:-1]
    body = {"model": "counter", "messages": asked, "max_completion_tokens": 8}
    whole = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    assert conversation.messages[-1] == {
        "role": "assistant",
        "content": whole["choices"][0]["message"]["content"],
    }
    assert "".join(text for text, _ in pieces) == "".join(
        said["content"] for said in conversation.messages if said["role"] == "assistant"
    )
    assert [message["role"] for message in conversation.messages] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    assert (await cluster.server_info()).live_requests == 0
