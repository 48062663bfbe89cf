"""The package as others get it, and the versions that the set-up pins."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvrelay.deploy.nodes.models import ALIASES

ROOT = Path(__file__).parents[2]
UNPINNED = {"triton"}  # each CUDA build of torch brings its own version
ROOMS = sorted(path.name for path in (ROOT / "src" / "kvrelay").iterdir() if path.is_symlink())
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")

IMPORT_ALL = """
import importlib, sys
from pathlib import Path

target = Path(sys.argv[1])
for path in sorted((target / "kvrelay").rglob("*.py")):
    if path.name != "__main__.py":
        name = ".".join(path.relative_to(target).with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name == "triton", error  # not everywhere
            continue
        # Not the checkout, which is installed here too.
        assert Path(module.__file__) == path, module.__file__
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the built wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "target"
    # A copy: the build leaves files beside what it builds.
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCE)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(wheels, check=True)
    [wheel] = folder.glob("kvrelay-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target)
    return target


def test_the_wheel_has_the_live_page(installed: Path):
    page = "router/doors/http/live_page.html"
    assert (installed / "kvrelay" / page).read_bytes() == (ROOT / page).read_bytes()


def test_the_wheel_has_every_room(installed: Path):
    assert {"deploy", "router", "engine", "mem_cache", "v1"} <= set(ROOMS)
    assert sorted(path.name for path in (installed / "kvrelay").iterdir()) == ROOMS
    for room in set(ROOMS) - {"v1"}:
        assert (installed / "kvrelay" / room / "py.typed").is_file(), room
    assert list((installed / "kvrelay" / "v1").glob("*.proto"))
    assert list((installed / "kvrelay" / "v1").glob("*.pyi"))
    assert not (installed / "kvrelay" / "deploy" / "charts" / "helm").exists(), (
        "the chart is installed by Helm"
    )
    for path in ("charts/dashboards/memory.json", "charts/prometheus/rules.yml"):
        assert (installed / "kvrelay" / "deploy" / path).is_file(), path


def test_the_wheel_has_every_module(installed: Path):
    made = {path.relative_to(installed / "kvrelay") for path in installed.rglob("*.py")}
    for room in set(ROOMS) - {"v1"}:
        there = {path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
        assert there <= made, there - made


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path):
    subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, installed],
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "HOME": str(tmp_path)},
    )


def pinned() -> dict[str, str]:
    """By the constraints; torch, of which one may want another build, by the Makefile."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    makefile = (ROOT / "Makefile").read_text()
    lines += re.findall(r"^TORCH \?= (.*)$", makefile, re.MULTILINE)
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [extras[extra] for extra in ("dev", "bench", "docs")]
    return [Requirement(text) for text in sum(chosen, project["dependencies"])]


def test_the_set_up_pins_every_direct_dependency_within_its_bounds():
    pins = pinned()
    assert not UNPINNED & set(pins)
    for requirement in declared():
        if requirement.name in UNPINNED:
            continue
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_the_set_up_installs_the_same_model_package_that_errors_name():
    makefile = (ROOT / "Makefile").read_text()
    for package in ALIASES.values():
        assert package.install.rpartition(" ")[2] in makefile


def test_the_installed_version_is_the_declared_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert importlib.metadata.version("kvrelay") == project["version"]
