"""Environments beside the project's own: of other people's tools, and of a machine with a GPU.

`make tools-env` and `make gpu-env` make them in `.venv-tools`, which git ignores.
`tests/tools/requirements` pins what is in them, but for torch, which tools have linked from the
environment that this runs in. What is there is left as it is, what was begun is gone on with, and a
changed file makes its environment anew.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, version
from pathlib import Path
from typing import Final

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-tools"
REQUIREMENTS: Final = Path(__file__).parent / "requirements"
OF_VLLM: Final = ROOT / os.environ.get("PEERS_VENV", ".venv-peers")
"""Made by `make peers-env`; `make bench-peers` compares with vLLM."""
CONSTRAINTS: Final = ROOT / "constraints.txt"
GPU_PYTHON: Final = os.environ.get("GPU_PYTHON", "python3.12")
"""The Python of a machine with a GPU: `make gpu-env GPU_PYTHON=...`."""
MINUTES: Final = 15.0
"""An environment takes one or two, where packages come fast."""
SHARED: Final = "torch"
"""A package of 800 MB, or several GB with CUDA, that is linked and not installed once more."""


class CannotMakeError(Exception):
    """An environment cannot be made now; says why in a line."""


@dataclass(frozen=True)
class Environment:
    """One tool's.

    Args:
        name: of the tool, of its folder and of its file of requirements.
        folder: where it is.
        requirements: pins what is in it.
        needs_torch: it gets links to that of the environment that this runs in.
        python: the command of the Python that it is made from; None: the one that this runs in.
        target: what makes it.
    """

    name: str
    folder: Path
    requirements: Path
    needs_torch: bool = False
    python: str | None = None
    target: str = "make tools-env"

    @classmethod
    def of(cls, name: str, *, needs_torch: bool = False) -> Environment:
        """At its usual place."""
        return cls(name, FOLDER / name, REQUIREMENTS / f"{name}.txt", needs_torch)

    @classmethod
    def of_gpu(cls) -> Environment:
        """The versions that a machine with a GPU has, kvrelay from this folder among them."""
        requirements = REQUIREMENTS / "gpu.txt"
        return cls("gpu", FOLDER / "gpu", requirements, False, GPU_PYTHON, "make gpu-env")

    @property
    def is_made(self) -> bool:
        """It is there, as the requirements are now."""
        return self._is_begun and self._made.is_file()

    def make(self, seconds: float) -> None:
        """Makes it, or goes on with what was begun of it; raises `CannotMakeError`.

        Args:
            seconds: pip may take.
        """
        if not self._is_begun:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._create(seconds)
            if self.needs_torch:
                link(SHARED, self._packages, without=pinned(self.requirements))
            self._begun.write_text(self._wanted)
        self._install(seconds)
        self._made.touch()

    def command(self, name: str) -> Path:
        """One of its commands; skips the test if the environment is not there."""
        if not self.is_made:
            pytest.skip(f"{self.name} is not installed, or in another version: {self.target}")
        return self.folder / "bin" / name

    def _create(self, seconds: float) -> None:
        python = sys.executable if self.python is None else find_python(self.python)
        if python is None:
            raise CannotMakeError(f"no {self.python} runs here: {self.target} GPU_PYTHON=...")
        returncode, said = run_bounded(
            [python, "-m", "venv", "--without-pip", self.folder], seconds
        )
        if returncode != 0:
            raise CannotMakeError(f"{python} makes no environment: {said[-300:]}")

    def _install(self, seconds: float) -> None:
        # pip's own cache has what it fetched before a failure.
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self._python,
            "--no-input",
        ]
        install = [*pip, "install", "-qq", "-r", self.requirements]
        returncode, said = run_bounded(install, seconds)
        if returncode != 0:
            errors = [line for line in said.splitlines() if line.startswith("ERROR")]
            raise CannotMakeError(errors[-1] if errors else f"pip failed: {said[-300:]}")

    @property
    def _python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def _packages(self) -> Path:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / python / "site-packages"

    @property
    def _wanted(self) -> str:
        """All that decides what is in it."""
        linked = f"# {SHARED} {version(SHARED)}\n" if self.needs_torch else ""
        wanted = linked + self.requirements.read_text()
        return wanted + CONSTRAINTS.read_text() if CONSTRAINTS.name in wanted else wanted

    @property
    def _begun(self) -> Path:
        return self.folder / "requirements.txt"

    @property
    def _made(self) -> Path:
        return self.folder / ".made"

    @property
    def _is_begun(self) -> bool:
        return self._begun.is_file() and self._begun.read_text() == self._wanted


class NodeEnvironment(Environment):
    """One of npm's: its requirements are packages with their versions, a line each."""

    def command(self, name: str) -> Path:
        """One of its commands; skips the test if the environment is not there."""
        return self.packages() / ".bin" / name

    def packages(self) -> Path:
        """The folder to import from; skips the test if the environment is not there."""
        return super().command("node").parents[1] / "node_modules"

    def _create(self, seconds: float) -> None:
        if shutil.which("npm") is None:
            raise CannotMakeError("no npm runs here: apt-get install npm")
        self.folder.mkdir(parents=True)

    def _install(self, seconds: float) -> None:
        quiet = ("--silent", "--no-fund", "--no-audit", "--no-update-notifier")
        wanted = self.requirements.read_text().split()
        command: list[str | Path] = ["npm", "install", *quiet, "--prefix", self.folder, *wanted]
        returncode, said = run_bounded(command, seconds)
        if returncode != 0:
            raise CannotMakeError(f"npm failed: {said[-300:]}")


def find_python(command: str) -> str | None:
    """Find a Python that runs by its command or path; pyenv's commands may stand for no version.

    Those are looked for in its folder of versions, the latest first.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    minor = command.removeprefix("python") if Path(command).name == command else ""
    others = sorted(pyenv.glob(f"{minor}.*/bin/{command}"), reverse=True) if minor else []
    for one in (shutil.which(command), *map(str, others)):
        if one is not None and run_bounded([one, "-c", ""], 60)[0] == 0:
            return one
    return None


def pinned(requirements: Path) -> set[str]:
    """Names, in their canonical form, of the packages that a file of requirements pins."""
    lines = requirements.read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def link(name: str, packages: Path, without: Collection[str]) -> None:
    """Link a package of the environment that this runs in, and what it needs, into another.

    Args:
        name: of the package.
        packages: the folder of the other environment's packages.
        without: names of packages that the other one has, or will have, itself.
    """
    for found in needed(name, without):
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in sorted(tops):
            (packages / top).symlink_to(str(found.locate_file(top)))


def needed(name: str, without: Collection[str]) -> Iterator[Distribution]:
    """A package that is installed here, and those that it needs here, each once."""
    seen, waiting = set(without), [name]
    while waiting:
        one = canonicalize_name(waiting.pop())
        if one in seen:
            continue
        seen.add(one)
        found = distribution(one)
        yield found
        needs = map(Requirement, found.requires or ())
        waiting += [
            need.name
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]


def run_bounded(command: Sequence[str | Path], seconds: float) -> tuple[int, str]:
    """Runs a command with all that it starts; returns how it ended, and what it said of errors.

    Raises:
        CannotMakeError: it was not done in time, and was killed.
    """
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=seconds)[1]
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotMakeError(f"it takes more than {seconds / 60:.0f} minutes") from None
            raise
    return process.returncode, said


AIPERF: Final = Environment.of("aiperf")
GUIDELLM: Final = Environment.of("guidellm", needs_torch=True)
LM_EVAL: Final = Environment.of("lm-eval", needs_torch=True)
CLAUDE_CODE: Final = NodeEnvironment.of("claude-code")
CODEX: Final = NodeEnvironment.of("codex")
AI_SDK: Final = NodeEnvironment.of("ai-sdk")
CLIENTS: Final = Environment.of("clients")
INSTRUCTOR: Final = Environment.of("instructor")
"""Its pins of jiter and anthropic exclude those of the other clients."""
OPENAI_AGENTS: Final = Environment.of("openai-agents")
ENVIRONMENTS: Final = (
    AIPERF,
    GUIDELLM,
    LM_EVAL,
    CLAUDE_CODE,
    CODEX,
    OPENAI_AGENTS,
    CLIENTS,
    INSTRUCTOR,
    AI_SDK,
)
GPU: Final = Environment.of_gpu()


def vllm_command() -> Path:
    """`vllm`; skips the test if the environment is not there."""
    command = OF_VLLM / "bin" / "vllm"
    if not command.exists():
        pytest.skip("vLLM is not installed: make peers-env")
    return command


@click.command(help=__doc__)
@click.option("--minutes", default=MINUTES, show_default=True, help="For each environment.")
@click.option("--gpu", is_flag=True, help="Make that of a machine with a GPU, and no other.")
def main(minutes: float, gpu: bool) -> None:
    """Make what is not there; fails if something cannot be had."""
    # As Ctrl-C does, it ends pip, which has a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(make_all([GPU] if gpu else ENVIRONMENTS, minutes * 60))


def make_all(environments: Sequence[Environment], seconds: float) -> str | None:
    """Makes those that are not there; returns a line on those that cannot be made.

    Args:
        environments: of the tools.
        seconds: for each.
    """
    failed = []
    for one in environments:
        if one.is_made:
            continue
        click.echo(f"==> making {one.folder}")
        begun = time.monotonic()
        try:
            one.make(seconds)
        except CannotMakeError as error:
            click.echo(f"    {one.name}: {error}", err=True)
            failed.append(one.name)
        else:
            click.echo(f"    done in {time.monotonic() - begun:.0f} s")
    if not failed:
        return None
    again = " and ".join(sorted({one.target for one in environments if one.name in failed}))
    return f"not made, their tests will be skipped: {', '.join(failed)}; {again} tries again"


if __name__ == "__main__":
    main()
