"""Files that workers of xdist read in turn: nothing that happens in one is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "breaks": "import nothing_there",
    "dies": "import os\ndef test_before(): pass\ndef test_it(): os._exit(3)",
    "fails": "def test_it(): assert 1 == 2\ndef test_after(): pass",
    "skips": "import pytest\npytest.skip(allow_module_level=True)",
    "passes": """
import pytest
@pytest.fixture(scope="session")
def once():
    return []
@pytest.mark.parametrize("number", range(3))
def test_it(number, once):
    once.append(number)
    assert len(once) == number + 1
@pytest.mark.slow
def test_never():
    raise AssertionError
""",
    "goes_on": "def test_it(): pass",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of pytest with two workers, and the last line that it writes."""
    plugins = [*("-p", "tests.collected_in_turn"), *("-p", "no:cacheprovider")]
    options = ["-n", "2", "--dist", "loadfile", "-m", "not slow", "-o", "markers=slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()[-1]


def test_all_that_happens_in_files_is_told(folder: Path) -> None:
    status, line = run(folder)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 6 passed, 1 skipped, 1 error in" in line, "one file is not gone on with"


@pytest.mark.slow
def test_a_file_without_tests_to_run_keeps_nothing_of_the_one_before(tmp_path: Path) -> None:
    never = "import pytest\npytestmark = pytest.mark.slow\ndef test_it(): pass"
    for name, text in {"a/test_a": FILES["goes_on"], "a/test_b": never, "c/test_c": never}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/test_d.py").write_text(FILES["goes_on"])
    status, line = run(tmp_path, "-n", "1")
    assert status == pytest.ExitCode.OK
    assert "2 passed in" in line


@pytest.mark.slow
def test_slow_tests_alone_are_asked_for(folder: Path) -> None:
    (folder / "test_breaks.py").unlink()
    _, line = run(folder, "-m", "slow")
    assert "1 failed, 1 skipped in" in line


@pytest.mark.slow
def test_tests_are_asked_for_by_name(folder: Path) -> None:
    status, line = run(folder, "test_fails.py::test_after", "test_passes.py::test_it")
    assert status == pytest.ExitCode.OK
    assert "4 passed in" in line
