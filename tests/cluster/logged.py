"""What a real cluster's logs have in them, at the lowest level, and what they must not have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

MARKER = "zanzibar"
IDS = [61, 62, 63, 64, 65, 66, 67]
"""A prompt by token ids; no log writes these seven numbers in a row."""


async def drive(
    stub: inference_pb2_grpc.InferenceServiceStub, http: httpx.AsyncClient
) -> list[str]:
    """Requests of many kinds, by both doors; returns what was generated."""
    outputs = []
    texts = [inference_pb2.GenerateRequest(text=f"{MARKER} {number}") for number in range(6)]
    for request in (*texts, inference_pb2.GenerateRequest()):
        if not request.text:
            request.input_ids.ids.extend(IDS)
        request.sampling_params.MergeFrom(
            inference_pb2.SamplingParams(max_tokens=24, ignore_eos=True, stop=[MARKER])
        )
        outputs.append("".join([event.delta.text async for event in stub.Generate(request)]))
    bad = inference_pb2.GenerateRequest(text=MARKER)
    bad.sampling_params.structured_output.regex = f"({MARKER}"
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Generate(bad).read()
    async with http:
        bodies: list[dict[str, Any]] = [
            {"prompt": MARKER, "max_tokens": 8},
            {"prompt": MARKER, "max_tokens": MARKER},
            {"prompt": {MARKER: MARKER}},
            {"prompt": MARKER, "model": MARKER},
        ]
        for body in bodies:
            await http.post("/v1/completions", json=body)
        await http.post("/v1/completions", content=f'{{"prompt": "{MARKER}'.encode())
        await http.post("/tokenize", json={"prompt": MARKER})
    return outputs


async def assert_no_secrets(started: set[str], outputs: list[str], router: str) -> None:
    """Look into the logs of these incarnations, what any process wrote, and the router's.

    Args:
        started: the incarnations.
        outputs: of the requests.
        router: what it has logged.
    """
    folder = Path(ray_module._private.worker._global_node.get_logs_dir_path())
    workers = await asyncio.to_thread(_lines_of, folder, started)
    raw = await asyncio.to_thread(_all_that_was_written, folder)
    assert {line["incarnation"] for line in workers} == started
    assert any(line["logger"] == "kvrelay.engine.faults" for line in workers)
    assert "ended: length" in router  # the router's log was read
    everything = router + json.dumps(workers) + raw
    secrets = [MARKER, ", ".join(map(str, IDS)), *(text for text in outputs if len(text) > 8)]
    assert len(secrets) > 3
    assert not [secret for secret in secrets if secret in everything]


def _all_that_was_written(folder: Path) -> str:
    """By all workers and the controller: tracebacks and what is printed, too."""
    paths = [path for path in folder.glob("worker-*.*") if path.suffix in (".out", ".err")]
    assert {path.suffix for path in paths} == {".out", ".err"}
    return "".join(path.read_text(errors="replace") for path in paths)


def _lines_of(folder: Path, incarnations: set[str]) -> list[dict[str, Any]]:
    """The log's messages of these workers; every line that they have logged is JSON."""
    lines = []
    for path in folder.glob("worker-*.err"):
        whole, _, _ = path.read_text(errors="replace").rpartition("\n")  # of a line that is written
        mine = [line for line in whole.splitlines() if line.startswith("{")]
        found = [json.loads(line) for line in mine]
        if any(line.get("incarnation") in incarnations for line in found):
            lines += found
    return [line for line in lines if "incarnation" in line]
