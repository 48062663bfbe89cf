"""Environments of other people's tools, each of its own: `make tools-env`.

They lie in `.venv-tools`, which git ignores. `tests/tools/requirements` pins all that is in them; a
changed file makes its environment anew.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-tools"
REQUIREMENTS: Final = Path(__file__).parent / "requirements"
OF_VLLM: Final = ROOT / os.environ.get("PEERS_VENV", ".venv-peers")
"""Made by `make bench-peers`, which compares with vLLM."""


@dataclass(frozen=True)
class Environment:
    """One tool's.

    Args:
        name: of the tool, of its folder and of its file of requirements.
        needs_torch: which a machine may have in a build of its own.
    """

    name: str
    needs_torch: bool = False

    @property
    def folder(self) -> Path:
        """Where it is."""
        return FOLDER / self.name

    @property
    def requirements(self) -> Path:
        """What is in it."""
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def is_made(self) -> bool:
        """It is there, as the requirements are now."""
        made = self._made
        return made.is_file() and made.read_text() == self.requirements.read_text()

    def make(self, torch: str) -> None:
        """Makes it anew; raises CalledProcessError if a package cannot be had."""
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True)
        python = str(self.folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        if self.needs_torch:
            subprocess.run([*pip, "install", "-qq", *shlex.split(torch)], check=True)
        subprocess.run([*pip, "install", "-qq", "-r", str(self.requirements)], check=True)
        self._made.write_text(self.requirements.read_text())

    def command(self, name: str) -> Path:
        """One of its commands; skips the test if the environment is not there."""
        if not self.is_made:
            pytest.skip(f"{self.name} is not installed, or in another version: make tools-env")
        return self.folder / "bin" / name

    @property
    def _made(self) -> Path:
        return self.folder / ".made"


AIPERF: Final = Environment("aiperf")
GUIDELLM: Final = Environment("guidellm", needs_torch=True)
LM_EVAL: Final = Environment("lm-eval", needs_torch=True)
ENVIRONMENTS: Final = (AIPERF, GUIDELLM, LM_EVAL)


def vllm_command() -> Path:
    """`vllm`; skips the test if the environment is not there."""
    command = OF_VLLM / "bin" / "vllm"
    if not command.exists():
        pytest.skip("vLLM is not installed: make bench-peers")
    return command


@click.command(help=__doc__)
@click.option("--torch", default="torch", help="What pip is told for torch.")
def main(torch: str) -> None:
    """Make what is not there; fails if something cannot be had."""
    failed = []
    for one in ENVIRONMENTS:
        if one.is_made:
            continue
        click.echo(f"==> making {one.folder}")
        try:
            one.make(torch)
        except subprocess.CalledProcessError as error:
            click.echo(f"{one.name}: {error}", err=True)
            failed.append(one.name)
    if failed:
        sys.exit(f"not made, their tests will be skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
