"""`make gpu` on a machine without a GPU, and how its stages are run and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import (
    Outcome,
    Peers,
    Result,
    Results,
    Stage,
    end_stage,
    run_stages,
    write_report,
)
from benchmarks.peers.__main__ import main as peers_command
from tests.known import known


def stage(name: str, code: str) -> Stage:
    return Stage(name, f"proves {name}", (sys.executable, "-c", code))


def outcomes(
    stages: list[Stage], folder: Path, seconds: float = 60, subject: str = "this", **again: bool
) -> list[Outcome]:
    found = run_stages(stages, Results(folder, subject), seconds, **again)
    return [result.outcome for _, result in found]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--minutes", "1", "--report", report],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "missing: " in run.stdout
    assert "CUDA" in run.stdout
    assert "nothing was run" in run.stdout
    assert "(--sglang)" in run.stdout
    assert not report.exists()


def test_a_stage_that_passed_is_not_run_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    passing = stage("passing", f"open({str(count)!r}, 'a').write('x')")
    failing = stage("failing", f"open({str(count)!r}, 'a').write('y'); raise SystemExit(1)")
    both = [passing, failing]
    expected = [Outcome.PASSED, Outcome.FAILED]
    assert outcomes(both, tmp_path) == expected
    assert outcomes(both, tmp_path) == expected
    assert count.read_text() == "xyy"
    assert outcomes([passing], tmp_path, again=True) == [Outcome.PASSED]
    assert outcomes([passing], tmp_path, subject="another GPU") == [Outcome.PASSED]
    assert count.read_text() == "xyyxx"


def test_time_is_bounded_over_all_stages(tmp_path: Path) -> None:
    slow, late = stage("slow", "import time; time.sleep(60)"), stage("late", "pass")
    assert outcomes([slow, late], tmp_path, 1) == [Outcome.TIMED_OUT, Outcome.NOT_RUN]
    assert outcomes([late], tmp_path) == [Outcome.PASSED]


def test_nothing_that_a_stage_has_started_goes_on() -> None:
    child = "import time; print('begun', flush=True); time.sleep(20); print('alive')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    with known(process.stdout) as output:
        assert output.readline() == b"begun\n"
        end_stage(process)
        assert output.read() == b""


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        ("3 skipped, 9 deselected in 1.20s", Outcome.NOTHING),
        ("no tests ran in 0.01s", Outcome.NOTHING),
        ("2 passed, 3 skipped in 12.00s", Outcome.PASSED),
    ],
)
def test_skipped_tests_prove_nothing(summary: str, outcome: Outcome, tmp_path: Path) -> None:
    assert outcomes([stage("tests", f"print({summary!r})")], tmp_path) == [outcome]


def test_the_report_has_every_stage_and_what_it_printed(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    found = [
        (stage("one", ""), Result(Outcome.PASSED, 12.3, "1 passed")),
        (stage("two", ""), Result(Outcome.NOT_RUN)),
    ]
    write_report(report, "r1; a GPU", ["nvcc"], found)
    text = report.read_text()
    assert "r1; a GPU" in text
    assert "- Missing: nvcc" in text
    assert "| one | proves one | passed | 12 |" in text
    assert "## one\n\n```\n1 passed\n```" in text
    assert "| two | proves two | not run: no time was left | 0 |" in text
    assert "## two" not in text


def install(folder: Path, *files: str) -> Path:
    """An environment of which nothing but these files is there."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


SGLANG = "lib/python3.11/site-packages/sglang/launch_server.py"


def test_only_engines_that_are_installed_are_compared_with(tmp_path: Path) -> None:
    vllm = install(tmp_path / "v", "bin/vllm")
    sglang = install(tmp_path / "s", SGLANG)
    nothing = install(tmp_path / "n", "bin/python")
    assert Peers(nothing, nothing).stage(tmp_path, "m") is None
    assert len(Peers(nothing, nothing).missing()) == 2
    alone = known(Peers(vllm, nothing).stage(tmp_path, "m"))
    assert "adaptive,aggregated,vllm" in alone.command
    assert Peers(vllm, nothing).missing() == [f"to compare with: sglang in {nothing} (--sglang)"]
    both = known(Peers(vllm, sglang).stage(tmp_path, "m"))
    assert "adaptive,aggregated,vllm,sglang" in both.command
    assert Peers(vllm, sglang).missing() == []


def test_runs_of_another_revision_or_gpu_are_not_taken_for_these(tmp_path: Path) -> None:
    peers = Peers(install(tmp_path, "bin/vllm"), tmp_path)
    one, other = (known(peers.stage(tmp_path, machine)).command for machine in ("a", "b"))
    assert [*one] != [*other]


def test_the_comparison_can_be_parsed(tmp_path: Path) -> None:
    """It is begun as the stage would, with nothing that must be measured."""
    stage = known(Peers(install(tmp_path, "bin/vllm", SGLANG), tmp_path).stage(tmp_path, "m"))
    options = list(stage.command[3:])
    with peers_command.make_context("peers", [*options, "--only", "page"]) as context:
        assert context.params["device"] == "cuda"
        assert context.params["systems"][-1] == "sglang"
