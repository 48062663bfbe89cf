"""CPU use of a cluster's own processes, for example while it is idle.

python -m benchmarks.idle_cpu --serve-pid PID
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import click
import psutil

# Parts of the command lines of Ray's own processes. A raylet is Ray's, what it
# started need not be: workers are its children.
_RAYLET = "/ray/raylet/raylet"
_RAY_PARTS = ("/ray/core/src/ray/", "/ray/dashboard/", "/ray/_private/", "/ray/autoscaler/")
_RAY_TITLES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray-dashboard-")


@dataclass(frozen=True)
class ProcessCpu:
    """What one process used, as a fraction of one core."""

    pid: int
    name: str
    fraction: float


def cpu_fraction(pids: Iterable[int], seconds: float) -> float:
    """CPU time of the processes over ``seconds``, as a fraction of one core; blocks meanwhile.

    Raises ``psutil.NoSuchProcess`` if one is not there or ends in the meantime.
    """
    return sum(usage.fraction for usage in measure(pids, seconds))


def measure(pids: Iterable[int], seconds: float) -> list[ProcessCpu]:
    """As ``cpu_fraction``, process by process."""
    processes = [psutil.Process(pid) for pid in dict.fromkeys(pids)]
    before = [_cpu_seconds(process) for process in processes]
    start = time.perf_counter()
    time.sleep(seconds)
    after = [_cpu_seconds(process) for process in processes]
    elapsed = time.perf_counter() - start
    return [
        ProcessCpu(process.pid, _title(process), (end - begin) / elapsed)
        for process, begin, end in zip(processes, before, after, strict=True)
    ]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def cluster_pids(serve_pid: int) -> list[int]:
    """``kvrelay serve`` and all its descendants, apart from Ray's own processes.

    By exclusion, so that a process that nobody thought of counts.
    """
    serve = psutil.Process(serve_pid)
    return [serve.pid, *_own_descendants(serve)]


def _own_descendants(parent: psutil.Process) -> list[int]:
    found: list[int] = []
    for child in parent.children():
        try:
            arguments = child.cmdline()
            ours = not is_ray_process(arguments)
            if ours:
                found.append(child.pid)
            if ours or is_raylet(arguments):
                found += _own_descendants(child)
        except psutil.NoSuchProcess:
            continue  # gone between the two looks, so not part of the idle cluster
    return found


def is_raylet(arguments: list[str]) -> bool:
    """Whether this is the command line of the process that starts Ray's workers."""
    return bool(arguments) and arguments[0].endswith(_RAYLET)


def is_ray_process(arguments: list[str]) -> bool:
    """Whether a command line is that of a daemon of Ray's or of a worker without work."""
    if arguments and arguments[0].startswith(_RAY_TITLES):
        return True
    return any(part in argument for argument in arguments[:3] for part in _RAY_PARTS)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()[:60] or process.name()


def _parse_pids(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[int]:
    try:
        return [int(pid) for pid in value.split(",")] if value else []
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of process ids") from error


@click.command(context_settings={"show_default": True})
@click.option("--serve-pid", type=int, help="A running `kvrelay serve`: it and its workers.")
@click.option("--pids", callback=_parse_pids, help="More processes, with commas.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, help="How long to look.")
@click.option("--limit", type=click.FloatRange(min=0), help="Exit with 1 above this percentage.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    serve_pid: int | None, pids: list[int], seconds: float, limit: float | None, as_json: bool
) -> None:
    """Print the CPU use of a cluster's processes in percent of one core.

    Ray's own daemons and its idle workers do not count.
    """
    if serve_pid is None and not pids:
        raise click.UsageError("give --serve-pid, --pids or both")
    try:
        found = cluster_pids(serve_pid) if serve_pid is not None else []
        usages = measure([*found, *pids], seconds)
    except psutil.Error as error:
        raise click.ClickException(str(error)) from error
    percent = 100 * sum(usage.fraction for usage in usages)
    _print_json(usages, percent, seconds) if as_json else _print_table(usages, percent)
    if limit is not None and percent > limit:
        raise click.ClickException(f"{percent:.1f}% of a core is above the limit of {limit:g}%")


def _print_table(usages: list[ProcessCpu], percent: float) -> None:
    for usage in usages:
        click.echo(f"{100 * usage.fraction:6.1f}%  {usage.pid:>8}  {usage.name}")
    plural = "" if len(usages) == 1 else "es"
    click.echo(f"{percent:6.1f}%  of one core in {len(usages)} process{plural}")


def _print_json(usages: list[ProcessCpu], percent: float, seconds: float) -> None:
    processes = [asdict(usage) for usage in usages]
    click.echo(json.dumps({"percent": percent, "seconds": seconds, "processes": processes}))


if __name__ == "__main__":
    main()
