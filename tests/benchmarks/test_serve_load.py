from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from kvrelay.deploy.commands.bench import bench as main
from kvrelay.deploy.load_generator.load_report import Slo
from kvrelay.deploy.load_generator.measurement import (
    Results,
    Run,
    RunBounds,
    RunProgress,
    ServerError,
    bench,
)
from kvrelay.deploy.load_generator.workload import (
    ClosedLoop,
    Load,
    Poisson,
    Shape,
    WorkloadError,
    fixed_workloads,
)
from kvrelay.deploy.reach.grpc_target import CommandAccess
from tests.deploy.terminal import Terminal
from tests.known import known

from .completions_server import ScriptedServer

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = RunBounds(max_seconds=30, deadline_s=20, warmup=0)


async def run_one(
    service, load: Load, requests: int, bounds: RunBounds = BOUNDS, slo: Slo | None = None
) -> Run:
    workloads = fixed_workloads([Shape(8, 4)], [load], requests, seed=0)
    results = await bench(service.address, workloads, bounds, slo or Slo())
    return results.runs[0]


async def test_closed_loop_keeps_its_slots_busy_and_sends_what_was_asked(service):
    service.pause_s = 0.005
    run = await run_one(service, ClosedLoop(3), 9, RunBounds(30, 20, warmup=2))
    assert service.most_running == 3
    assert run.report.requests.completed == 9
    assert run.report.output_tokens == 36
    assert [record.index for record in run.records] == list(range(9))
    prompts = {tuple(request.input_ids.ids) for request in service.requests}
    assert len(prompts) == len(service.requests) == 11
    for request in service.requests:
        assert len(request.input_ids.ids) == 8
        assert max(request.input_ids.ids) < 100
        params = request.sampling_params
        assert (params.max_tokens, params.ignore_eos, params.temperature) == (4, True, 0.0)
        assert params.HasField("temperature")


async def test_latencies_are_those_of_the_stream(service):
    service.pause_s = 0.02
    report = (await run_one(service, ClosedLoop(1), 2)).report
    assert known(report.itl_ms).count == 6
    assert known(report.ttft_ms).p50 >= 20
    assert known(report.itl_ms).mean >= 15
    assert known(report.e2e_ms).p50 >= 80
    assert known(report.phases_ms["decode"]).mean == pytest.approx(2)
    assert report.cached_tokens == 2


async def test_several_tokens_a_delta(service):
    service.tokens_per_delta = 3
    report = (await run_one(service, ClosedLoop(1), 2)).report
    assert report.tokens_per_delta == 2
    assert known(report.itl_ms).count == 2


async def test_a_poisson_load_does_not_wait_for_answers(service):
    service.pause_s = 0.1
    run = await run_one(service, Poisson(1000.0), 10)
    assert service.most_running == 10
    assert run.report.requests.completed == 10
    assert known(run.report.send_lag_ms).count == 10


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("reject", "RESOURCE_EXHAUSTED", "busy"),
        ("abort", "WRONG_OUTPUT", "FINISH_REASON_ABORT"),
        ("short", "WRONG_OUTPUT", "3 tokens instead of 4"),
        ("gap", "WRONG_OUTPUT", "index 1 after 0 tokens"),
        ("cut", "WRONG_OUTPUT", "without a completion"),
    ],
)
async def test_a_faulty_answer_is_a_failure_and_misses_the_slo(service, fault, status, detail):
    service.faults = {1: fault}
    run = await run_one(service, ClosedLoop(1), 4, slo=Slo(ttft_ms=10_000, itl_ms=10_000))
    assert run.report.requests.failures == {status: 1}
    assert detail in run.records[1].detail
    assert known(run.report.slo).share == 0.75
    assert known(run.report.ttft_ms).count == 3


async def test_a_request_past_its_deadline_is_a_failure(service):
    service.faults = {0: "hang"}
    run = await run_one(service, ClosedLoop(1), 2, RunBounds(30, deadline_s=0.3, warmup=0))
    assert run.report.requests.failures == {"DEADLINE_EXCEEDED": 1}
    assert run.report.requests.completed == 1


@pytest.mark.parametrize("load", [ClosedLoop(1), Poisson(20.0)], ids=str)
async def test_when_time_runs_out_the_rest_is_not_sent_and_the_running_are_waited_for(
    service, load
):
    service.pause_s = 0.05
    requests = (await run_one(service, load, 1000, RunBounds(0.5, 20, warmup=0))).report.requests
    assert requests.failed == 0
    assert 1 <= requests.completed < 100
    assert requests.completed == len(service.requests)
    assert requests.not_sent == 1000 - requests.completed


async def test_a_server_that_fails_the_warm_up_is_not_measured(service):
    service.faults = {0: "reject"}
    with pytest.raises(ServerError, match="warm-up request failed: RESOURCE_EXHAUSTED: busy"):
        await run_one(service, ClosedLoop(1), 4, RunBounds(30, 20, warmup=1))
    assert len(service.requests) == 1


async def test_a_request_beyond_the_model_is_refused_before_any_is_sent(service):
    workloads = fixed_workloads([Shape(4, 4), Shape(64, 1)], [ClosedLoop(1)], 1, seed=0)
    with pytest.raises(WorkloadError, match="64 tokens"):
        await bench(service.address, workloads, BOUNDS, Slo())
    assert service.requests == []


async def test_interrupting_a_run_ends_its_streams(service):
    service.faults = {0: "hang"}
    run = asyncio.create_task(run_one(service, ClosedLoop(1), 1))
    await service.busy.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    async with asyncio.timeout(60):
        await service.idle.wait()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    await server.runner.setup()
    site = web.TCPSite(server.runner, "127.0.0.1", 0)
    await site.start()
    host, port = server.runner.addresses[0]
    server.base_url = f"http://{host}:{port}"
    yield server
    await server.runner.cleanup()


async def command(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrelay.deploy",
        "bench",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_sweeps_and_writes_a_table_and_json(service, tmp_path):
    path = tmp_path / "figures.json"
    options = ["--target", service.address, "--shape", "8/4,16/2", "--concurrency", "1,2"]
    options += ["--requests", "3", "--slo-ttft-ms", "10000", "--json", str(path), "--json-requests"]
    code, out, err = await command(*options)
    assert (code, err.count("3 requests")) == (0, 4)
    assert len([line for line in out.splitlines() if line.startswith(("| 8/4", "| 16/2"))]) == 4
    document = json.loads(path.read_text())
    assert document["schema"] == "kvrelay.serve_load/1"
    assert document["server"]["decode_workers"] == 2
    assert [run["output_tokens"] for run in document["runs"]] == [12, 12, 6, 6]
    assert [run["slo"]["share"] for run in document["runs"]] == [1.0] * 4
    assert [len(run["records"]) for run in document["runs"]] == [3] * 4


async def test_the_command_replays_a_trace_to_standard_output(service, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 90, "output_length": 3} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = ["--target", service.address, "--trace", str(path), "--time-scale", "0.01"]
    code, out, err = await command(*options, "--json", "-")
    assert code == 1
    assert "4 of 4 requests of trace.jsonl are longer than" in err
    code, out, _ = await command(*options, "--json", "-", "--max-input-len", "20")
    (run,) = json.loads(out)["runs"]
    assert (code, run["load"], run["input_tokens"]) == (0, "replay x0.01", 80)
    assert run["duration_s"] >= 0.03


async def test_the_command_fails_when_no_request_completes(service):
    service.faults = dict.fromkeys(range(8), "reject")
    options = ["--target", service.address, "--shape", "8/4", "--warmup", "0", "--requests", "8"]
    code, out, err = await command(*options)
    assert code == 1
    assert "8 failed (8 RESOURCE_EXHAUSTED)" in out
    assert "no request completed" in err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--concurrency", "1", "--rate", "2"], "exclude each other"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "1,"], "at least 1"),
        (["--rate", "nan"], "above 0"),
        (["--rate", "fast"], "fast"),
        (["--shape", "256"], "INPUT/OUTPUT"),
        (["--time-scale", "2"], "needs --trace"),
        (["--max-input-len", "2"], "need --trace"),
        (["--trace", __file__, "--sweep"], "excludes"),
        (["--trace", __file__], "neither .csv"),
        (["--target", "127.0.0.1:1", "--requests", "1"], "127.0.0.1:1: UNAVAILABLE"),
    ],
)
def test_bad_options_end_with_one_clear_line(options, complaint):
    result = CliRunner().invoke(main, options)
    assert result.exit_code != 0
    assert complaint in " ".join(result.output.split())
    assert not isinstance(result.exception, (ValueError, RuntimeError))


def test_help_shows_the_defaults():
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for default in ("127.0.0.1:50051", "(256/128)", "(8)", "600.0", "300.0"):
        assert f"[default: {default}" in text


def test_a_missing_matplotlib_is_named_before_anything_is_sent(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(main, ["--plot", "x.png", "--target", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "pip install 'kvrelay[bench]'" in result.output


async def test_every_call_brings_the_token(service):
    [workload] = fixed_workloads([Shape(5, 3)], [ClosedLoop(1)], 2, seed=0)
    await bench(service.address, [workload], BOUNDS, Slo(), CommandAccess(token="secret"))
    assert service.authorizations == ["Bearer secret"] * 4  # what it is, twice, and two requests


async def test_the_plot_is_drawn(service, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra 'bench') is not installed")
    from kvrelay.deploy.load_generator.plot import PlotError, save_plot

    service.faults = {3: "reject"}
    workloads = fixed_workloads([Shape(8, 4)], [ClosedLoop(1), ClosedLoop(2)], 3, seed=0)
    results: Results = await bench(service.address, workloads, BOUNDS, Slo())
    runs = [(run.report, run.records) for run in results.runs]
    save_plot(tmp_path / "a.png", runs)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PlotError, match="xyz"):
        save_plot(tmp_path / "a.xyz", runs)


async def test_any_openai_server_can_be_the_target(server: ScriptedServer, tmp_path: Path):
    path = tmp_path / "figures.json"
    # As OpenAI's own: only the end of a stream tells how many tokens there are.
    server.fault = "late usage"
    options = ["--target", f"{server.base_url}/v1", "--shape", "8/4", "--requests", "3"]
    code, _out, err = await command(*options, "--vocab-size", "50", "--json", str(path))
    assert code == 0, err
    document = json.loads(path.read_text())
    [run] = document["runs"]
    assert document["server"] == {"model": "scripted", "vocab_size": 50}
    assert (run["requests"]["completed"], run["output_tokens"]) == (3, 12)
    assert (run["tokens_per_delta"], run["itl_ms"]["count"]) == (1.0, 9)
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) == 3 + 2
    assert all(max(prompt) < 50 and len(prompt) == 8 for prompt in prompts)


async def test_a_target_of_http_that_is_not_there(server: ScriptedServer):
    code, _out, err = await command("--target", "http://127.0.0.1:9", "--requests", "1")
    assert code == 1
    assert err.startswith("kvrelay: http://127.0.0.1:9: it does not tell its models: ")


def test_progress_counts_requests_and_failures(record):
    progress = RunProgress(3)
    with progress:
        progress.take(record())
        progress.take(record(status="UNAVAILABLE"))
    assert (progress.ended, progress.failed) == (2, 1)


@pytest.mark.slow
async def test_a_terminal_shows_progress(service):
    service.pause_s = 0.02
    options = ["--target", service.address, "--shape", "8/4", "--requests", "20"]
    terminal = Terminal(["bench", *options, "--concurrency", "1"], TERM="xterm")
    try:
        await asyncio.to_thread(terminal.read_until, lambda: "/20 0 failed" in terminal.text)
        await asyncio.to_thread(terminal.read_until, lambda: "TTFT" in terminal.text)
    finally:
        terminal.close()
