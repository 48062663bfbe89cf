"""Prepare what a machine with a GPU and no network needs beside the checkout: `make gpu-kit`.

python -m benchmarks.gpu_kit.prepare --help

The folder .gpukit gets archives of packages, cut down, and of FlashInfer's modules, compiled here.
What was fetched, compiled and packed is kept in build/gpukit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.gpu_kit import archives, kernels, wheels

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 60 << 20
"""Checkout and kit together: what may travel is 64 MiB."""
COMPILER_NEEDS = (
    *("flashinfer-python", "apache-tvm-ffi", "ninja", "jinja2", "markupsafe", "filelock"),
    *("requests", "tqdm", "packaging", "einops", "tabulate", "nvidia-ml-py", "click"),
)
"""FlashInfer, and what its compiler imports beside torch."""
CHOICES = {"none": (), "first": kernels.FIRST, "all": kernels.ALL}


@click.command()
@click.option(
    "--kernels", "chosen", type=click.Choice(list(CHOICES)), default="first", show_default=True
)
@click.option("--only", multiple=True, help="Compile this module alone; may be repeated.")
@click.option("--jobs", default=1, show_default=True, help="Cores to pack and compile with.")
@click.option("--kit", type=click.Path(path_type=Path), default=ROOT / ".gpukit")
@click.option("--build", type=click.Path(path_type=Path), default=ROOT / "build" / "gpukit")
def main(chosen: str, only: tuple[str, ...], jobs: int, kit: Path, build: Path) -> None:
    """Prepare the kit; fails if it is too large to travel beside the checkout.

    --kernels says which of FlashInfer's modules are compiled here: that takes one core 20 minutes
    once. The others are compiled where there is a GPU.
    """
    click.echo("== wheels")
    pins = wheels.read_pins(Path(__file__).parent / "packages.txt", ROOT / "constraints.txt")
    wheels.fetch(pins, build / "wheels")
    compiled = build / "kernels"
    if names := only or CHOICES[chosen]:
        click.echo(f"== kernels: {' '.join(names)}")
        wheels.install(pins, COMPILER_NEEDS, build / "flashinfer")
        if lack := lack_of_compiler():
            click.echo(f"   none: {lack}")
        else:
            compile_kernels(names, build, compiled, jobs)
    click.echo("== archives")
    archives.make_archives(build / "wheels", compiled, kit, build / "archives", jobs)
    (kit / "revision").write_text(_git("describe", "--always", "--dirty"))
    checkout, carried = checkout_bytes(), sum(one.stat().st_size for one in kit.iterdir())
    click.echo(size_line(checkout, carried))
    sys.exit(checkout + carried > LIMIT_BYTES)


def lack_of_compiler() -> str | None:
    """Say what compiling needs and is not here."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (shutil.which("nvcc") or (home / "bin" / "nvcc").exists()):
        return "no nvcc in PATH or CUDA_HOME"
    if importlib.util.find_spec("torch") is None:
        return f"no torch for {sys.executable}"
    return None


def compile_kernels(names: tuple[str, ...], build: Path, into: Path, jobs: int) -> None:
    """Compile modules that are not there; what fails is compiled where there is a GPU."""
    flashinfer = build / "flashinfer"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(flashinfer), str(ROOT)]),
        "PATH": os.pathsep.join([str(flashinfer / "bin"), os.environ["PATH"]]),
        "FLASHINFER_WORKSPACE_BASE": str(build / "compiling"),
        "MAX_JOBS": str(jobs),
    }
    module = [sys.executable, "-m", "benchmarks.gpu_kit.kernels", "--into", str(into)]
    ended = subprocess.run([*module, *names], env=environment, check=False)  # noqa: S603
    if ended.returncode:
        click.echo("   what has failed is compiled there")


def checkout_bytes() -> int:
    """Count the bytes of files that git knows, or would not ignore."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [ROOT / name for name in set(listed.split("\0")) if name]
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def size_line(checkout: int, carried: int) -> str:
    """Say how much will travel, and whether it may."""
    total = checkout + carried
    said = (
        f"{checkout / 1e6:.1f} MB of the checkout and {carried / 1e6:.1f} MB of the kit: "
        f"{total / LIMIT_BYTES:.0%} of {LIMIT_BYTES >> 20} MiB"
    )
    return said if total <= LIMIT_BYTES else f"{said}. Too large: compile fewer kernels (--kernels)"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
