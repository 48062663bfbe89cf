"""What a machine with a GPU can prove and measure, in stages of some minutes, the cheapest first.

python -m benchmarks.gpu --help

A line tells how each stage ended, PASS, FAIL, TIME (out of time), SKIP (no time was left) or NONE
(what it needs is not here), its seconds and its figures. Without a GPU nothing runs but `--trial`;
what the machine lacks is printed, and the exit status is 2. It is 1 if a stage did not pass.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from benchmarks.gpu_kit.compiling import Compiling
from benchmarks.gpu_kit.running import Outcome, Report, Result, Sessions
from benchmarks.gpu_kit.stage_table import SETS, STAGES, Stage, choose
from benchmarks.with_cluster import interrupt_on_signals
from kvrelay.model_runner.attention.flashinfer_compiler import compiler_lacks

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 5.0
"""A stage with less time left is not begun."""
COMPILING_PART = 0.4
"""The most of all time to wait for kernels."""
Groups = Sequence[Sequence[Stage]]


def run_groups(
    groups: Groups,
    begin: Callable[[Stage, float], Result],
    seconds: float,
    compiling: Compiling | None = None,
    end_all: Callable[[], None] = lambda: None,
) -> Generator[Result | list[str], None, None]:
    """Run the groups one after the other, the stages of one side by side, within `seconds` in all.

    Yields each result as it comes, and lines about kernels.

    Args:
        groups: the stages.
        begin: runs a stage within so many seconds.
        seconds: the limit on all of them.
        compiling: compiles the kernels that stages need before them; None: nothing does.
        end_all: ends stages that run when this is interrupted.
    """
    end = time.monotonic() + seconds
    needs = [[name for stage in group for name in stage.kernels] for group in groups]
    if compiling is not None:
        compiling.start(next(filter(None, needs), []))

    def within_limits(stage: Stage) -> Result:
        left = min(stage.seconds, end - time.monotonic())
        return begin(stage, left) if left >= LEAST_SECONDS else Result(stage.name, Outcome.SKIP)

    for group, names in zip(groups, needs, strict=True):
        if compiling is not None and names:
            compiling.start(names)
            left = end - time.monotonic() - LEAST_SECONDS
            yield compiling.wait(max(0.0, min(seconds * COMPILING_PART, left)))
        with ThreadPoolExecutor(len(group)) as pool:
            running = [pool.submit(within_limits, stage) for stage in group]
            try:
                yield from (one.result() for one in as_completed(running))
            except BaseException:
                end_all()
                raise


def missing() -> list[str]:
    """Say what the machine lacks for any stage, a line each."""
    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is a build without CUDA: install one for CUDA"]
    if not torch.cuda.is_available():
        return ["no CUDA device: neither a GPU nor its driver was found"]
    return []


def missing_for_attention() -> list[str]:
    """Say what it lacks for FlashInfer alone, a line each."""
    lines = []
    if _version("flashinfer-python") is None:
        lines.append("FlashInfer: pip install 'kvrelay[cuda]'")
    if lack := compiler_lacks():
        lines.append(f"to compile FlashInfer's kernels: {lack}")
    return lines


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_revision() -> str:
    """Name the revision: as the kit was prepared from it, or as git knows it, or not at all."""
    prepared = ROOT / ".gpukit" / "revision"
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return prepared.read_text() if prepared.exists() else "no revision"


def describe_machine() -> str:
    """Name the GPUs and the versions that results are of."""
    gpus = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    names = ("torch", "triton", "flashinfer-python", "nixl", "vllm", "sglang")
    versions = [f"{name} {found}" for name in names if (found := _version(name))]
    return f"{', '.join(gpus) or 'no GPU'}; {', '.join(versions)}"


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, type=click.Choice([*SETS, *STAGES]), metavar="SET|STAGE...")
@click.option("--minutes", type=click.FloatRange(min=0), default=30.0, help="For all stages.")
@click.option("--trial", is_flag=True, help="Try that stages run: tiny ones, on a CPU.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    envvar="OUT",
    default=Path("build/gpu"),
    help="Gets summary.txt, figures.jsonl and logs.tgz.",
)
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    default=Path("/dev/shm/kvrelay-models"),  # noqa: S108
    help="Gets models with random weights, 20 GB of them.",
)
@click.option("--vllm", type=click.Path(path_type=Path), default=Path(sys.prefix))
@click.option("--sglang", type=click.Path(path_type=Path), default=Path(sys.prefix))
@click.option("--terabytes-per-second", default=3.0, help="The ceiling of the GPU's memory.")
@click.option("--teraflops", default=798.0, help="The ceiling of its products in bfloat16.")
@click.option("--compile-into", type=click.Path(path_type=Path), hidden=True)
def main(
    names: tuple[str, ...],
    minutes: float,
    trial: bool,
    out: Path,
    models: Path,
    vllm: Path,
    sglang: Path,
    terabytes_per_second: float,
    teraflops: float,
    compile_into: Path | None,
) -> None:
    """Run stages on this machine's GPU: first (is it right?), speed, more, all, or some by name.

    --vllm and --sglang are environments of other engines, to compare with (peers).
    """
    lacks = [] if trial else missing()
    if lacks:
        for lack in [*lacks, *missing_for_attention()]:
            click.echo(f"missing: {lack}")
        click.echo("make gpu: nothing was run, for there is no GPU to run it on")
        sys.exit(2)
    for lack in [] if trial else missing_for_attention():
        click.echo(f"missing: {lack}")
    places = {
        "device": "cpu" if trial else "cuda:0",
        "models": models,
        "out": out.absolute(),
        "vllm": vllm,
        "sglang": sglang,
        "revision": describe_revision(),
        "terabytes": terabytes_per_second,
        "teraflops": teraflops,
    }
    interrupt_on_signals()
    with TemporaryDirectory() as logs:
        report = Report(out.absolute(), Path(logs))
        compiling = None if trial else Compiling(compile_into, report.logs)
        again = run_and_tell(choose(names or ("first",)), places, minutes, report, compiling)
    click.echo(f"logs: {out / 'logs.tgz'}")
    if again:
        click.echo(f"again: {' '.join(again)}")
    sys.exit(bool(again))


def run_and_tell(
    groups: Groups,
    places: Mapping[str, object],
    minutes: float,
    report: Report,
    compiling: Compiling | None,
) -> list[str]:
    """Run stages, and tell what comes of them; returns the names of those that did not pass.

    Args:
        groups: the stages.
        places: what words in braces in their arguments stand for.
        minutes: the limit on all of them.
        report: gets what there is to tell.
        compiling: compiles kernels; None: this is a trial, in which a stage may show nothing.
    """
    trial = compiling is None
    places = {**places, "figures": report.figures, "logs": report.logs}
    sessions = Sessions()
    report.say([f"{places['revision']}; {describe_machine()}"])

    def begin(stage: Stage, seconds: float) -> Result:
        command = stage.command(places, trial=trial)
        return sessions.run(stage.name, command, seconds, report.logs / f"{stage.name}.log")

    fine = {Outcome.PASS, Outcome.NONE} if trial else {Outcome.PASS}
    begun, again = time.monotonic(), []
    with nullcontext() if compiling is None else closing(compiling):
        for told in run_groups(groups, begin, 60 * minutes, compiling, sessions.end):
            report.say(told.lines() if isinstance(told, Result) else told)
            if isinstance(told, Result) and told.outcome not in fine:
                again.append(told.name)
    report.say([f"{time.monotonic() - begun:.0f} s in all"])
    return again


if __name__ == "__main__":
    main()
