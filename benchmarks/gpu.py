"""What a machine with a GPU can prove and measure, in stages, the cheapest proof first.

python -m benchmarks.gpu --help

Every stage is a command. A stage that has passed is not run again for the same revision and
GPU: after a stage was mended, or time ran out, the same command goes on. Without a GPU nothing
runs; what the machine lacks is printed, and the exit status is 2. It is 1 while a stage is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile

import click
import torch

from kvrelay.model_runner.attention.flashinfer_compiler import compiler_lacks

_SHOWN_LINES = 30
"""Of a stage's output, in the report."""
_GRACE_SECONDS = 30.0
"""That a stage without time left gets to stop what it has started."""
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")


class Outcome(StrEnum):
    """How a stage ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOTHING = "nothing ran: what it needs is not here"
    TIMED_OUT = "out of time"
    NOT_RUN = "not run: no time was left"


@dataclass(frozen=True)
class Stage:
    """A command that proves or measures something."""

    name: str
    proves: str
    command: Sequence[str]


STAGES = (
    Stage(
        "sampling",
        "kernels draw the CPU's tokens",
        (*_PYTEST, "tests/model_runner/test_device_sampler.py"),
    ),
    Stage(
        "copies",
        "pages between page orders and devices; streams, events and pinned memory",
        (*_PYTEST, "tests/mem_cache"),
    ),
    Stage(
        "attention",
        "FlashInfer's kernels give plain torch's results; compiles them, which takes minutes",
        (*_PYTEST, "tests/model_runner/test_gpu.py", "-k", "attention"),
    ),
    Stage(
        "models",
        "every model in float32 and bfloat16 against transformers",
        (*_PYTEST, "tests/model_runner/test_gpu.py", "-k", "models"),
    ),
    Stage(
        "formats",
        "products and KV in FP8, CUDA graphs, prompts over latents",
        (*_PYTEST, "tests/model_runner/test_gpu_formats.py"),
    ),
    Stage("transfer", "the transfer agent beside pools on a GPU", (*_PYTEST, "tests/kv_transfer")),
    Stage(
        "load",
        "a cluster of a prefill and a decode worker under load",
        (
            *(sys.executable, "-m", "benchmarks.with_cluster"),
            *("--device", "cuda", "--grpc", "127.0.0.1:0"),
            *("--", "--sweep", "--max-seconds", "60"),
        ),
    ),
)


@dataclass(frozen=True)
class Result:
    """What came of a stage."""

    outcome: Outcome
    seconds: float = 0.0
    output: str = ""
    """Its last lines."""


class Results:
    """The results of one revision on one machine, kept in a folder, a file for each stage."""

    def __init__(self, folder: Path, subject: str) -> None:
        self._folder = folder
        self._subject = subject

    def get(self, stage: Stage) -> Result | None:
        """What came of `stage` here, of the same command, if that is known."""
        try:
            found = json.loads(self._file(stage).read_text())
        except FileNotFoundError:
            return None
        if (found["subject"], found["command"]) != (self._subject, list(stage.command)):
            return None
        return Result(Outcome(found["outcome"]), found["seconds"], found["output"])

    def put(self, stage: Stage, result: Result) -> None:
        """Keep it, in place of what was known."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = {"subject": self._subject, "command": stage.command, **asdict(result)}
        self._file(stage).write_text(json.dumps(known))

    def _file(self, stage: Stage) -> Path:
        return self._folder / f"{stage.name}.json"


def missing() -> list[str]:
    """What the machine lacks for any stage, a line each."""
    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is a build without CUDA: install one for CUDA"]
    if not torch.cuda.is_available():
        return ["no CUDA device: neither a GPU nor its driver was found"]
    return []


def missing_for_attention() -> list[str]:
    """What it lacks for FlashInfer alone, a line each."""
    lines = []
    if _version("flashinfer-python") is None:
        lines.append("FlashInfer: pip install 'kvrelay[cuda]'")
    if lack := compiler_lacks():
        lines.append(f"to compile FlashInfer's kernels: {lack}")
    return lines


@dataclass(frozen=True)
class Peers:
    """The environments of the engines that kvrelay is compared with."""

    vllm: Path
    sglang: Path

    def installed(self) -> list[str]:
        """Those that are there, by the names that `benchmarks.peers` has for them."""
        sglang = self.sglang.glob("lib/python3*/site-packages/sglang/launch_server.py")
        found = {"vllm": (self.vllm / "bin" / "vllm").exists(), "sglang": any(sglang)}
        return [name for name, is_there in found.items() if is_there]

    def missing(self) -> list[str]:
        """What is not there, a line each."""
        names = {"vllm": self.vllm, "sglang": self.sglang}
        for name in self.installed():
            del names[name]
        return [f"to compare with: {name} in {at} (--{name})" for name, at in names.items()]

    def stage(self, folder: Path, machine: str) -> Stage | None:
        """The comparison with those that are there, if any. Its runs are those of this machine."""
        names = self.installed()
        if not names:
            return None
        runs = folder / f"peers-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.jsonl"
        return Stage(
            "peers",
            f"kvrelay beside {' and '.join(names)} by one client in turn; tables in {folder}",
            (
                *(sys.executable, "-m", "benchmarks.peers", "--device", "cuda"),
                *("--systems", ",".join(("adaptive", "aggregated", *names)), "--rounds", "2"),
                *("--loads", "256/128@8,256/128@64,1024/64@8,1024/64@64"),
                *("--runs", str(runs), "--page", str(folder)),
                *("--vllm", str(self.vllm), "--sglang", str(self.sglang)),
            ),
        )


def run_stages(
    stages: Sequence[Stage], results: Results, seconds: float, again: bool = False
) -> Iterator[tuple[Stage, Result]]:
    """Each stage with what came of it, now or, unless `again`, before, within `seconds` in all."""
    end = time.monotonic() + seconds
    for stage in stages:
        known = None if again else results.get(stage)
        if known is not None and known.outcome is Outcome.PASSED:
            yield stage, known
            continue
        left = end - time.monotonic()
        if left <= 0:
            yield stage, Result(Outcome.NOT_RUN)
            continue
        result = run_stage(stage, left)
        results.put(stage, result)
        yield stage, result


def run_stage(stage: Stage, seconds: float) -> Result:
    """Run its command, which is ended after `seconds`, with all processes of its session."""
    begin = time.monotonic()
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603
            stage.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
            end_stage(process)
        output.seek(0)
        lines = "\n".join(output.read().splitlines()[-_SHOWN_LINES:])
    outcome = Outcome.TIMED_OUT if timed_out else _judge(process.returncode, lines)
    return Result(outcome, time.monotonic() - begin, lines)


def end_stage(process: subprocess.Popen[bytes]) -> None:
    """Let a stage stop its cluster, then kill what is left of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(returncode: int, output: str) -> Outcome:
    """Of tests that were all skipped, or of which there are none, nothing is proven."""
    summary = re.search(r"(\d+ \w+, )*\d+ \w+ in [\d.]+s|no tests ran", output)
    if summary is not None and "passed" not in summary[0] and "failed" not in summary[0]:
        return Outcome.NOTHING
    return Outcome.FAILED if returncode else Outcome.PASSED


def describe_machine() -> str:
    """The revision, the GPUs and the versions that results are of."""
    gpus = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    names = ("torch", "triton", "flashinfer-python", "nixl", "vllm", "sglang")
    versions = [f"{name} {found}" for name in names if (found := _version(name))]
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return f"{revision or 'no revision'}; {', '.join(gpus)}; {', '.join(versions)}"


def write_report(
    path: Path, machine: str, lacks: Sequence[str], found: Sequence[tuple[Stage, Result]]
) -> None:
    """A page with a row for each stage, and the end of what each one printed."""
    lines = ["# On a GPU", "", f"Written by `make gpu`. {machine}.", ""]
    lines += [f"- Missing: {lack}" for lack in lacks] + [""] * bool(lacks)
    lines += ["| stage | what it proves | outcome | seconds |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {stage.name} | {stage.proves} | {result.outcome} | {result.seconds:.0f} |"
        for stage, result in found
    ]
    for stage, result in found:
        if result.output:
            lines += ["", f"## {stage.name}", "", "```", result.output, "```"]
    path.write_text("\n".join(lines) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=click.FloatRange(min=0), default=30.0, help="For all stages.")
@click.option("--again", is_flag=True, help="Run stages, too, that have passed.")
@click.option("--folder", type=Path, default=Path("build/gpu"), help="Where results are kept.")
@click.option("--report", type=Path, default=Path("docs/gpu-report.md"), help="The page to write.")
@click.option(
    "--vllm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sys.prefix),
    show_default="this one",
    help="The environment with vLLM.",
)
@click.option(
    "--sglang",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sys.prefix),
    show_default="this one",
    help="The environment with SGLang.",
)
def main(minutes: float, again: bool, folder: Path, report: Path, vllm: Path, sglang: Path) -> None:
    """Run the stages that have not passed yet on this machine's GPU, and write a report."""
    peers = Peers(vllm, sglang)
    if lacks := missing():
        for lack in [*lacks, *missing_for_attention(), *peers.missing()]:
            click.echo(f"missing: {lack}")
        click.echo("make gpu: nothing was run, for there is no GPU to run it on")
        sys.exit(2)
    lacks, machine = [*missing_for_attention(), *peers.missing()], describe_machine()
    comparison = peers.stage(folder, machine)
    stages = STAGES if comparison is None else (*STAGES, comparison)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for stage, result in run_stages(stages, Results(folder, machine), 60 * minutes, again):
        click.echo(f"{stage.name}: {result.outcome}, {result.seconds:.0f} s")
        found.append((stage, result))
        write_report(report, machine, lacks, found)
    click.echo(f"report: {report}")
    sys.exit(any(result.outcome is not Outcome.PASSED for _, result in found))


if __name__ == "__main__":
    main()
