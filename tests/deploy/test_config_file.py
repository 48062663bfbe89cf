from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands import serve as serve_module
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.options.memory_share import MemoryShare


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options that `serve` would have run with."""
    runs: list[ServeOptions] = []

    def run(options: ServeOptions, progress: object, *, debug: bool) -> None:
        runs.append(options)

    monkeypatch.setattr(serve_module, "run", run)
    return runs


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments])


def write(folder: Path, text: str) -> str:
    path = folder / "kvrelay.toml"
    path.write_text(text)
    return str(path)


EVERYTHING: dict[str, Any] = {
    "model": "some/model",
    "model_name": "mine",
    "prefill": 2,
    "decode": 3,
    "aggregated": 0,
    "page_size": 1,
    "page_order": "layer_first",
    "prefix_index": "none",
    "kv_events": True,
    "kv_memory": 1 << 30,
    "host_kv_memory": 2 << 30,
    "kv_storage": "/var/kv",
    "kv_storage_size": 3 << 30,
    "dtype": "float32",
    "device": "cpu",
    "grpc": Address("0.0.0.0", 1),
    "http": Address("0.0.0.0", 3),
    "chat_template": Path("chat.jinja"),
    "tool_call_parser": "hermes",
    "reasoning_parser": "think",
    "http_origins": "https://a.example",
    "http_keep_alive": 90.0,
    "sse_keepalive": 15.5,
    "drain_seconds": 120.5,
    "admin": Address("0.0.0.0", 2),
    "metrics": Address("127.0.0.1", 0),
    "tls_cert": Path("a.crt"),
    "tls_key": Path("a.key"),
    "tls_ca": Path("ca.pem"),
    "front_tls_cert": Path("b.crt"),
    "front_tls_key": Path("b.key"),
    "tls_name": "worker.kv",
    "ray_address": "auto",
    "cluster_name": "chat",
    "advertise": "one=10.0.0.1",
    "prefill_on": "rack=a",
    "decode_on": "accelerator=H100",
    "aggregated_on": "resource.fast=1.5",
    "copy_model": True,
    "spread": "pack",
    "worker_cpus": 20,
    "worker_gpus": 0.5,
    "placement_timeout": 600.5,
    "auth_token_file": Path("tokens"),
    "seed_key_file": Path("key"),
    "insecure": True,
    "max_running": 5,
    "chunk_tokens": 6,
    "max_model_len": 7,
    "overlap": False,
    "growth_min": 0.25,
    "growth_max": 0.5,
    "bypass_limit": 0,
    "speculation": "draft",
    "draft_model": "some/draft",
    "num_draft_tokens": 3,
    "threads": 8,
    "prompt_threads": 4,
    "default_max_tokens": 9,
    "max_live_requests": 10,
    "worker_timeout": 2.5,
    "worker_lease": 20.5,
    "grants_ahead": 12,
    "step_timeout": 5.5,
    "step_timeout_per_token": 0.75,
    "max_attempts": 13,
    "failover_wait": 6.5,
    "worker_wait": 7.5,
    "max_waiting_for_workers": 14,
    "failed_forwards_limit": 15,
    "max_text_bytes": 16,
    "max_grammar_bytes": 65538,
    "max_message_bytes": 65537,
    "model_code": "transformers",
    "batch_invariant": True,
    "cpu_kernels": "own",
    "moe_backend": "torch",
    "attention": "cpu",
    "attention_splits": "none",
    "kv_dtype": "fp8_e4m3",
    "cuda_graphs": "decode",
    "cuda_graph_sizes": "1,2,4",
    "near": "zone",
    "log_format": "json",
    "log_prompts": True,
    "trace_sample": 0.5,
    "otlp": "http://localhost:4318",
    "session_timeout": 60.5,
    "max_sessions": 19,
    "max_session_tokens": 20,
    "max_session_share": 0.25,
    "max_unread_bytes": 17,
    "read_timeout": 8.5,
    "prefix_wait": 9.5,
    "deadline_margin": 2.5,
    "itl_target": 40.5,
    "ttft_target": 900.5,
    "placement": "disaggregated",
    "metric_names": "vllm",
    "prefix_index_entries": 18,
    "start_timeout": 30.5,
    "drain_grace": 3.5,
    "quarantine_limit": 4.5,
    "debug_faults": "drop:done:2",
    "debug_retract_every": 11,
    "audit_pages": True,
    "verify_pages": "all",
    "min_transfer_gigabytes_per_second": 1.5,
    "strict": True,
}


def as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def test_every_option_can_stand_in_the_file(tmp_path: Path, served: list[ServeOptions]):
    assert set(EVERYTHING) == set(ServeOptions.__dataclass_fields__)
    lines = [f"{name.replace('_', '-')} = {as_toml(value)}" for name, value in EVERYTHING.items()]
    result = serve("--config", write(tmp_path, "\n".join(lines)))
    assert result.exit_code == 0, result.output
    assert served == [ServeOptions(**EVERYTHING)]


def test_no_option_gives_the_defaults(served: list[ServeOptions]):
    assert serve().exit_code == 0
    assert served == [ServeOptions()]


def test_the_command_line_wins(tmp_path: Path, served: list[ServeOptions]):
    config = write(tmp_path, 'page_size = 8\nkv-memory = "1GiB"\nprefill = 2')
    assert serve("--page-size", "4", "--config", config, "--prefill", "1").exit_code == 0
    assert served == [ServeOptions(page_size=4, kv_memory=1 << 30, prefill=1)]


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        ('"auto"', MemoryShare.auto()),
        ('"0.85"', MemoryShare(0.85)),
        ('"40%"', MemoryShare(0.4)),
        ('"1.5GiB"', 3 << 29),
        ("4096", 4096),
    ],
)
def test_kv_memory_is_bytes_or_a_share(
    value: str, memory: int | MemoryShare, tmp_path: Path, served: list[ServeOptions]
):
    assert serve("--config", write(tmp_path, f"kv-memory = {value}")).exit_code == 0
    assert serve("--kv-memory", value.strip('"')).exit_code == 0
    assert served == [ServeOptions(kv_memory=memory)] * 2


def test_a_share_that_cannot_be_is_refused():
    result = serve("--kv-memory", "140%")
    assert result.exit_code == 2
    assert "--kv-memory" in result.output
    assert "a share is more than 0 and at most 1" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagesize = 8", "unknown option 'pagesize'"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("[serve]\nprefill = 1", "unknown option 'serve'"),
        ("prefill = '2'", "'prefill' must be an integer, got '2'"),
        ("prefill = true", "'prefill' must be an integer, got True"),
        ("page-size = 1.5", "'page-size' must be an integer, got 1.5"),
        ("model = 7", "'model' must be a string, got 7"),
        ("insecure = 'yes'", "'insecure' must be a boolean, got 'yes'"),
        ("kv-memory = 1.5", "'kv-memory' must be an integer or a string, got 1.5"),
        ("kv-memory = 'much'", "'--kv-memory': 'much' is not a size"),
        ("overlap = 1", "'overlap' must be a boolean or a string, got 1"),
        ("overlap = 'maybe'", "'--overlap': 'maybe' is neither on nor off"),
        ("dtype = 'int4'", "'--dtype': 'int4' is not one of"),
        ("prefill = -1", "'--prefill': -1 is not in the range"),
        ("prefill = 0", "--prefill: must be at least 1, got 0"),
        ("aggregated = 1\ndecode = 2", "--aggregated: such workers do"),
        ("grpc = '0.0.0.0:1'", "--grpc: 0.0.0.0:1 can be reached from other machines"),
        ("page-size = 1\npage_size = 2", "'page_size' is given twice"),
        ("prefill = ", "not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(
    tmp_path: Path, served: list[ServeOptions], text: str, message: str
):
    result = serve("--config", write(tmp_path, text))
    assert result.exit_code == 2
    assert message in result.stderr
    assert served == []


def test_a_switch_is_on_or_off_wherever_it_stands(tmp_path: Path, served: list[ServeOptions]):
    off = write(tmp_path, "overlap = 'off'")
    for arguments in (
        ["--overlap", "off"],
        ["--config", off],
        ["--config", off, "--overlap", "on"],
    ):
        assert serve(*arguments).exit_code == 0
    assert [options.overlap for options in served] == [False, False, True]


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    result = serve("--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


def test_help_shows_every_option_and_its_default():
    text = " ".join(serve("--help").output.split())
    for field in ServeOptions.__dataclass_fields__:
        assert f"--{field.replace('_', '-')} " in text
    for default in ("smollm2-135m-instruct", "(512MiB; auto on a GPU)", "127.0.0.1:50051"):
        assert f"[default: {default}]" in text
