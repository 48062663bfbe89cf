"""Environments of tools: made once, gone on with, made anew; what cannot be had is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from .environments import CannotMakeError, Environment, find_python, make_all

SECONDS = 120.0
NAME = "kvrelay-tests-tool"


def put_wheel(folder: Path, release: str) -> None:
    """A package with a module that knows its version."""
    module, info = NAME.replace("-", "_"), f"{NAME.replace('-', '_')}-{release}.dist-info"
    files = {
        f"{module}.py": f"release = {release!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {release}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{release}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


def environment(folder: Path, release: str, *, needs_torch: bool = False) -> Environment:
    """One that pins the package, of a folder that may have it."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"--no-index\n--find-links {folder}\n{NAME}=={release}\n")
    return Environment("tool", folder / "made", requirements, needs_torch)


def run(environment: Environment, code: str) -> str:
    """What code prints there."""
    command = [str(environment.folder / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_what_was_begun_goes_on_and_another_version_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = environment(tmp_path, "1.0")
    assert "tool" in (make_all([one], SECONDS) or "")
    assert "No matching distribution found for kvrelay-tests-tool==1.0" in capsys.readouterr().err
    assert not one.is_made
    with pytest.raises(pytest.skip.Exception, match="make tools-env"):
        one.command("tool")
    kept = one.folder / "of-the-first-try"
    kept.touch()
    put_wheel(tmp_path, "1.0")
    assert make_all([one], SECONDS) is None
    assert one.is_made
    assert kept.exists()
    code = f"import {NAME.replace('-', '_')} as tool; print(tool.release)"
    assert run(one, code) == "1.0\n"
    put_wheel(tmp_path, "2.0")
    other = environment(tmp_path, "2.0")
    assert not one.is_made
    other.make(SECONDS)
    assert run(other, code) == "2.0\n"
    assert not kept.exists()


@pytest.mark.slow
def test_torch_is_linked_as_it_is_here(tmp_path: Path) -> None:
    put_wheel(tmp_path, "1.0")
    one = environment(tmp_path, "1.0", needs_torch=True)
    one.make(SECONDS)
    code = "from importlib.metadata import version; print(version('torch'))"
    assert run(one, code).strip() == version("torch")
    [folder] = one.folder.rglob("site-packages/torch")
    assert folder.is_symlink()
    assert (folder / "__init__.py").is_file()


@pytest.mark.slow
def test_what_takes_too_long_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """The package is a pipe that nobody writes to."""
    one = environment(tmp_path, "1.0")
    os.mkfifo(tmp_path / f"{NAME.replace('-', '_')}-1.0-py3-none-any.whl")
    begun = time.monotonic()
    with pytest.raises(CannotMakeError, match="takes more than"):
        one.make(2.0)
    while [line for line in processes() if str(tmp_path) in line]:  # what is killed ends soon
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.01)


def processes() -> list[str]:
    """The command lines of all that run."""
    return subprocess.run(
        ["ps", "-eo", "args"], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_a_python_is_found_by_its_path_too(tmp_path: Path) -> None:
    assert find_python(sys.executable) == sys.executable
    assert find_python(str(tmp_path / "python3.12")) is None
