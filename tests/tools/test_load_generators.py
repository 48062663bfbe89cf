"""Other people's load generators, unchanged, against a cluster of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL, Served
from .environments import AIPERF, GUIDELLM, vllm_command

pytestmark = [pytest.mark.slow, pytest.mark.alone]
REQUESTS = 8
INPUT_TOKENS = 64
OUTPUT_TOKENS = 12
AT_ONCE = 4


def read(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
async def test_vllm_bench_serve(served: Served, tmp_path: Path, backend: str, path: str) -> None:
    """It finds the model, and its tokenizer, by what the server says of it."""
    command: list[str | Path] = [
        vllm_command(),
        "bench",
        "serve",
        "--backend",
        backend,
        "--base-url",
        served.http,
    ]
    command += ["--endpoint", path, "--dataset-name", "random", "--num-prompts", str(REQUESTS)]
    command += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--max-concurrency", str(AT_ONCE), "--ignore-eos", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"]
    await served.run(command, tmp_path)
    result = read(tmp_path / "result.json")
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert result["model_id"].startswith("/"), "the folder of the served model"
    assert result["mean_ttft_ms"] > 0
    assert result["mean_itl_ms"] > 0
    await served.assert_at_baseline()


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_aiperf(served: Served, tmp_path: Path, kind: str) -> None:
    """By itself it would count tokens by encoding the text, which may give one less."""
    command: list[str | Path] = [AIPERF.command("aiperf"), "profile", "--model", MODEL]
    command += ["--url", served.http, "--endpoint-type", kind, "--streaming"]
    command += ["--tokenizer", served.model_path, "--use-server-token-count"]
    command += ["--concurrency", str(AT_ONCE), "--request-count", str(REQUESTS)]
    command += ["--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean"]
    command += [str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    command += ["--artifact-dir", tmp_path / "out", "--random-seed", "1"]
    await served.run(command, tmp_path, offline=False)
    [path] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    result = read(path)
    assert result["request_count"]["avg"] == REQUESTS
    assert not result.get("error_request_count", {}).get("avg")
    tokens = result["output_sequence_length"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
    assert result["input_sequence_length"]["min"] >= INPUT_TOKENS
    assert result["time_to_first_token"]["avg"] > 0
    assert result["inter_token_latency"]["avg"] > 0
    await served.assert_at_baseline()


@pytest.mark.parametrize("kind", ["/v1/completions", "/v1/chat/completions"])
async def test_guidellm(served: Served, tmp_path: Path, kind: str) -> None:
    data = f"prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command: list[str | Path] = [GUIDELLM.command("guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={served.http},request_format={kind}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={served.model_path}"]
    command += ["--data", f"kind=synthetic_text,{data}", "--profile"]
    command += [f"kind=concurrent,streams={AT_ONCE}", "--constraint"]
    command += [f"kind=max_requests,count={REQUESTS}"]
    command += ["--output", f"kind=json,path={tmp_path / 'result.json'}"]
    await served.run(command, tmp_path)
    [benchmark] = read(tmp_path / "result.json")["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"]
    assert {one["output_tokens"] for one in requests["successful"]} == {OUTPUT_TOKENS}
    await served.assert_at_baseline()
