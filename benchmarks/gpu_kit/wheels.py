"""The wheels that travel: which, and how they are fetched for the Python of another machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHON = "3.12"
GLIBCS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBCS),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
"""Platforms that pip matches by their exact names."""


def read_pins(packages: Path, constraints: Path) -> dict[str, str]:
    """Read the version of each package; those without one have that of the constraints."""
    constrained = {canonicalize_name(one.name): _pin(one) for one in _requirements(constraints)}
    pins: dict[str, str] = {}
    for one in _requirements(packages):
        name = canonicalize_name(one.name)
        version = _pin(one) or constrained.get(name)
        if version is None:
            raise ValueError(f"{packages}: {one.name} needs a version: {constraints} has none")
        pins[name] = version
    return pins


def _requirements(path: Path) -> Iterable[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def _pin(requirement: Requirement) -> str | None:
    return next((one.version for one in requirement.specifier if one.operator == "=="), None)


def fetch(pins: Mapping[str, str], into: Path) -> None:
    """Fetch the wheels that are not there yet, and remove all others."""
    into.mkdir(parents=True, exist_ok=True)
    missing = dict(pins)
    for wheel in into.glob("*.whl"):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if missing.get(name) == str(version):
            del missing[name]
        else:
            wheel.unlink()
    if not missing:
        return
    platforms = [part for one in PLATFORMS for part in ("--platform", one)]
    wanted = [f"{name}=={version}" for name, version in missing.items()]
    pip = [sys.executable, "-m", "pip", "--no-input", "download", "-qq", "--no-deps"]
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command = [*pip, *target, *platforms, "-d", str(into), *wanted]
    subprocess.run(command, check=True)  # noqa: S603


def install(pins: Mapping[str, str], names: Iterable[str], into: Path) -> None:
    """Install packages for this Python into a folder, without what they need."""
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in names]
    pip = [sys.executable, "-m", "pip", "--no-input", "install", "-qq", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(into), *wanted], check=True)  # noqa: S603
