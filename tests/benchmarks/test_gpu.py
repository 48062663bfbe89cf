"""`make gpu`: how stages are run, judged and told, and that each of them can run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu import main, run_and_tell, run_groups
from benchmarks.gpu_kit import kernels
from benchmarks.gpu_kit.running import Outcome, Report, Result, Sessions, judge
from benchmarks.gpu_kit.stage_table import SETS, STAGES, Stage, choose
from benchmarks.gpu_kit.stages.peers import comparison, installed
from benchmarks.peers.__main__ import main as peers_command
from tests.tools.environments import GPU, ROOT


def stage(name: str, seconds: float = 60) -> Stage:
    return Stage(name, f"shows {name}", seconds, ("module",), ())


def passing(stage: Stage, _seconds: float) -> Result:
    return Result(stage.name, Outcome.PASS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["first", "--out", str(tmp_path / "out")])
    assert ended.exit_code == 2
    assert "missing: " in ended.output
    assert "CUDA" in ended.output
    assert "nothing was run" in ended.output
    assert not (tmp_path / "out").exists()


def test_stages_of_a_group_run_side_by_side_and_groups_in_turn() -> None:
    together, order = threading.Barrier(2, timeout=30), list[str]()

    def begin(stage: Stage, seconds: float) -> Result:
        if stage.name != "last":
            together.wait()
        order.append(stage.name)
        return passing(stage, seconds)

    results = list(run_groups([[stage("a"), stage("b")], [stage("last")]], begin, 600))
    assert [one.outcome for one in results if isinstance(one, Result)] == [Outcome.PASS] * 3
    assert order[-1] == "last"


def test_each_stage_has_a_limit_and_all_of_them_have_one() -> None:
    given = dict[str, float]()

    def begin(stage: Stage, seconds: float) -> Result:
        given[stage.name] = seconds
        return passing(stage, seconds)

    groups = [[stage("short", 20)], [stage("long", 900)]]
    assert len(list(run_groups(groups, begin, 600))) == 2
    assert given["short"] == 20
    assert 500 < given["long"] < 600
    left = [one.outcome for one in run_groups(groups, begin, 3) if isinstance(one, Result)]
    assert left == [Outcome.SKIP, Outcome.SKIP]


def test_nothing_that_a_stage_has_started_goes_on(tmp_path: Path) -> None:
    child = "import time; print('begun', flush=True); time.sleep(20); print('alive')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    result = Sessions().run("endless", [sys.executable, "-c", code], 0.5, tmp_path / "log")
    assert result.outcome is Outcome.TIME
    assert result.seconds < 10
    assert "alive" not in result.log


def test_stages_that_run_end_with_the_runner(tmp_path: Path) -> None:
    sessions, begun = Sessions(), threading.Event()

    def begin(stage: Stage, seconds: float) -> Result:
        if stage.name == "brief":
            assert begun.wait(30)
            return passing(stage, seconds)
        log = tmp_path / "log"
        code = "import time; print('begun', flush=True); time.sleep(60)"
        threading.Thread(target=await_text, args=(log, begun), daemon=True).start()
        return sessions.run(stage.name, [sys.executable, "-c", code], seconds, log)

    told = run_groups([[stage("brief"), stage("endless")]], begin, 600, None, sessions.end)
    assert next(told) == Result("brief", Outcome.PASS)
    before = time.monotonic()
    told.close()
    assert time.monotonic() - before < 30


def await_text(log: Path, seen: threading.Event) -> None:
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    seen.set()


@pytest.mark.parametrize(
    ("returncode", "log", "outcome"),
    [
        (0, "3 skipped, 9 deselected in 1.20s", Outcome.NONE),
        (0, "2 passed, 3 skipped in 12.00s", Outcome.PASS),
        (0, "NONE no engine is installed", Outcome.NONE),
        (0, "FIGURE 3 TB/s", Outcome.PASS),
        # Tests have moved, and the stage still names them as they were.
        (5, "9 deselected in 0.20s", Outcome.FAIL),
        (1, "1 failed, 2 passed in 0.20s", Outcome.FAIL),
    ],
)
def test_how_a_stage_is_judged(returncode: int, log: str, outcome: Outcome) -> None:
    assert judge(returncode, log) is outcome


def test_the_report_has_figures_and_why_a_stage_failed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    report = Report(tmp_path / "out", logs)
    (logs / "one.log").write_text("FIGURE 2 GB/s")
    report.say(Result("one", Outcome.PASS, 12.3, "FIGURE 2 GB/s\n1 passed in 3.00s").lines())
    log = "words\nE   RuntimeError: no kernel\nmore words\nthe end"
    report.say(Result("two", Outcome.FAIL, 1.0, log).lines())
    assert (tmp_path / "out" / "summary.txt").read_text().splitlines() == [
        "PASS one 12 s, 1 passed in 3.00s",
        "     2 GB/s",
        "FAIL two 1 s",
        "     | E   RuntimeError: no kernel",
        *(f"     | {line}" for line in log.splitlines()),
    ]
    with tarfile.open(tmp_path / "out" / "logs.tgz") as tar:
        assert "logs/one.log" in tar.getnames()


def test_what_did_not_pass_is_named_to_be_run_again(tmp_path: Path) -> None:
    passing = Stage("passing", "a module of Python's", 60, ("platform",), (), ("{word}",))
    failing = Stage("failing", "one that is not there", 60, ("nothing_of_ours",), ())
    report = Report(tmp_path / "out", tmp_path)
    places = {"revision": "r1", "word": "terse"}
    assert run_and_tell([[passing], [failing]], places, 1, report, None) == ["failing"]
    assert (tmp_path / "passing.log").read_text().startswith("Linux")
    told = (tmp_path / "out" / "summary.txt").read_text()
    assert told.startswith("r1; ")
    assert "PASS passing" in told
    assert "No module named nothing_of_ours" in told


def test_stages_are_chosen_by_name_or_set_and_keep_their_order() -> None:
    chosen = [[one.name for one in group] for group in choose(("pair", "more", "sampling"))]
    assert chosen == [["sampling"], ["pair"], ["attention-more"], ["experts-more"]]
    assert {one for names in SETS.values() for one in names} == set(STAGES)


def test_stages_name_modules_tests_and_kernels_that_are_there() -> None:
    for one in STAGES.values():
        assert importlib.util.find_spec(one.module[0]) is not None
        for word in one.arguments:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
        assert set(one.kernels) <= set(kernels.ALL)


SGLANG = "lib/python3.11/site-packages/sglang/launch_server.py"


def install(folder: Path, *files: str) -> Path:
    """Make an environment of which nothing but these files is there."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_only_engines_that_are_installed_are_compared_with(tmp_path: Path) -> None:
    vllm, sglang = install(tmp_path / "v", "bin/vllm"), install(tmp_path / "s", SGLANG)
    assert installed(tmp_path, tmp_path) == []
    assert installed(vllm, tmp_path) == ["vllm"]
    assert installed(vllm, sglang) == ["vllm", "sglang"]


def test_the_comparison_can_be_parsed_and_is_of_one_revision_and_gpu(tmp_path: Path) -> None:
    """It is begun as the stage would, with nothing that must be measured."""
    both = ["vllm", "sglang"]
    vllm = install(tmp_path, "bin/vllm", SGLANG)
    options = comparison(both, vllm, vllm, tmp_path, "a", "cuda")
    assert options != comparison(both, vllm, vllm, tmp_path, "b", "cuda")
    with peers_command.make_context("peers", [*options, "--only", "page"]) as context:
        assert context.params["device"] == "cuda"
        assert context.params["systems"][-1] == "sglang"


def try_stages(python: str | Path, out: Path, *may_show_nothing: str) -> None:
    """Try all stages on the CPU; fails with what they printed if one of them cannot run."""
    places = ("--out", str(out), "--models", str(out / "models"))
    command = [python, "-m", "benchmarks.gpu", "--trial", "--minutes", "20", *places, "all"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [line.split(" ") for line in ended.stdout.splitlines()]  # others are indented
    outcomes = {words[1]: words[0] for words in told if words[0] in Outcome.__members__}
    assert set(outcomes) == set(STAGES)
    on_gpu_alone = {name for name, one in STAGES.items() if one.is_test} | {"peers"}
    nothing = {name for name, one in outcomes.items() if one == "NONE"}
    assert nothing - {*may_show_nothing} == on_gpu_alone


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of a GPU would run")
def test_every_stage_runs_here(tmp_path: Path) -> None:
    try_stages(sys.executable, tmp_path)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of a GPU would run")
def test_every_stage_runs_with_the_versions_of_a_machine_with_a_gpu(tmp_path: Path) -> None:
    # Triton 3.6's interpreter cannot draw with the NumPy that is there.
    try_stages(GPU.command("python"), tmp_path, "draws")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "tests",
    ["test_fake_cuda.py", "test_fake_cuda_graphs.py", "test_cuda_graphs.py", "test_gpu.py"],
)
def test_tests_pass_with_the_versions_of_a_machine_with_a_gpu(tests: str) -> None:
    """Torch's and Triton's words and parameters differ from one version to the next."""
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
    command = [str(GPU.command("python")), "-m", "pytest", *options, f"tests/model_runner/{tests}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
