"""Run `benchmarks.gpu` where there is a GPU and no network: `make gpu-offline`.

python -m benchmarks.gpu_kit.offline [options of benchmarks.gpu]

It unpacks the kit that `make gpu-kit` prepared, once a machine, and needs no package to do so. The
kit's packages come before those of the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = Path(os.environ.get("GPU_KIT", ROOT / ".gpukit"))
UNPACKED = Path(os.environ.get("GPU_KIT_UNPACKED", Path(tempfile.gettempdir()) / "kvrelay-gpukit"))


def main(arguments: list[str]) -> None:
    """Unpack the kit, unless it is unpacked, and become the runner; fails without a kit."""
    archives = sorted(KIT.glob("*.tar.xz"), key=lambda path: -path.stat().st_size)
    if not archives:
        sys.exit(f"no kit in {KIT}: make gpu-kit prepares it, and it travels with the checkout")
    site, done = UNPACKED / "site", UNPACKED / "done"
    wanted = "".join(f"{one.name} {one.stat().st_size}\n" for one in archives)
    if not done.exists() or done.read_text() != wanted:
        unpack_all(archives, site)
        done.write_text(wanted)
    environment = {**os.environ, **settings(site, UNPACKED)}
    # Bytecode of the kit is made while it is unpacked; names are resolved when they are needed.
    for name in ("PYTHONDONTWRITEBYTECODE", "LD_BIND_NOW"):
        environment.pop(name, None)
    os.chdir(ROOT)
    compiled = site / "flashinfer" / "data" / "aot"
    runner = [sys.executable, "-m", "benchmarks.gpu", "--compile-into", str(compiled), *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, runner, environment)  # noqa: S606


def unpack_all(archives: list[Path], site: Path) -> None:
    """Unpack the archives side by side, and compile their Python."""
    begun = time.monotonic()
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(unpack, archives, [site] * len(archives)))
    # The project is not installed, and is asked for its version.
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    info = site / f"kvrelay-{version[1]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvrelay\nVersion: {version[1]}\n")
    unpacked = time.monotonic()
    compiling = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(site)]
    subprocess.run(compiling, check=False)  # noqa: S603
    compiled = time.monotonic()
    print(
        f"{len(archives)} archives in {unpacked - begun:.1f} s, "
        f"their Python in {compiled - unpacked:.1f} s"
    )


def unpack(archive: Path, site: Path) -> None:
    """Unpack one archive of the kit's."""
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(site, filter="fully_trusted")  # noqa: S202


def settings(site: Path, folder: Path) -> dict[str, str]:
    """List the environment variables with which the kit's packages run, and compile."""
    sys.path.insert(0, str(site))  # click, if the machine has none
    from benchmarks.gpu_kit.kernels import OFFLINE

    path = [str(site), str(ROOT / "src"), str(ROOT)]
    headers = [
        str(found)
        for root in dict.fromkeys(one for one in sys.path if one)
        for found in Path(root).glob("nvidia/*/include")
    ]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PATH": _with("PATH", str(Path(sys.executable).parent), last=True),
        **{name: os.environ.get(name, value) for name, value in OFFLINE.items()},
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "CPATH": _with("CPATH", *headers, last=True),
        "LIBRARY_PATH": _with("LIBRARY_PATH", offer_driver(folder), "/usr/local/cuda/lib64"),
        "CXX": os.environ.get("CXX") or shutil.which("c++") or "g++",
    }


def offer_driver(folder: Path) -> str:
    """Make a folder in which a linker finds the driver's library; it has no name for linkers."""
    offered = folder / "driver" / "libcuda.so"
    offered.parent.mkdir(parents=True, exist_ok=True)
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    driver = re.search(r"libcuda\.so\.1 .*=> (\S+)", known.stdout)
    if driver is not None and not offered.is_symlink():
        offered.symlink_to(driver[1])
    return str(offered.parent)


def _with(name: str, *paths: str, last: bool = False) -> str:
    before = [one for one in os.environ.get(name, "").split(os.pathsep) if one]
    return os.pathsep.join([*before, *paths] if last else [*paths, *before])


if __name__ == "__main__":
    main(sys.argv[1:])
