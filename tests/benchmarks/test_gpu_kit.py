"""`make gpu-kit` and `make gpu-offline`: what travels, and that it is there what it was here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_kit import archives, offline, wheels
from benchmarks.gpu_kit.kernels import leave_out_unused
from benchmarks.gpu_kit.prepare import LIMIT_BYTES, checkout_bytes, size_line
from tests.tools.environments import ROOT


def test_every_package_of_the_kit_has_a_version() -> None:
    packages = ROOT / "benchmarks" / "gpu_kit" / "packages.txt"
    pins = wheels.read_pins(packages, ROOT / "constraints.txt")
    assert pins["nixl-cu13"] == pins["nixl"]
    assert "flashinfer-python" in pins
    assert all(pins.values())


def test_a_package_without_a_version_is_refused(tmp_path: Path) -> None:
    packages, constraints = tmp_path / "packages.txt", tmp_path / "constraints.txt"
    packages.write_text("# words\nOne_package\nother==2  # words\n")
    constraints.write_text("one-package==1.0\n")
    assert wheels.read_pins(packages, constraints) == {"one-package": "1.0", "other": "2"}
    constraints.write_text("")
    with pytest.raises(ValueError, match="One_package needs a version"):
        wheels.read_pins(packages, constraints)


def put_wheel(folder: Path, name: str, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(f"{name}/{path}", text)


def test_what_is_packed_is_unpacked_and_imports(tmp_path: Path) -> None:
    put_wheel(tmp_path / "wheels", "kit_one", **{"__init__.py": "answer = 42\n"})
    files = {"__init__.py": "", "rllib/agent.py": "x = 1\n", "actor.py": "x = 2\n"}
    put_wheel(tmp_path / "wheels", "ray", **files)
    module = tmp_path / "kernels" / "batch_decode" / "batch_decode.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"compiled")
    kit, site = tmp_path / "kit", tmp_path / "site"
    size = archives.make_archives(
        tmp_path / "wheels", tmp_path / "kernels", kit, tmp_path / "kept", jobs=1
    )
    assert size == sum(one.stat().st_size for one in kit.iterdir())
    offline.unpack_all(sorted(kit.glob("*.tar.xz")), site)
    said = subprocess.run(
        [sys.executable, "-c", "import kit_one, ray.actor; print(kit_one.answer)"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "42\n"
    assert not (site / "ray" / "rllib").exists()
    assert (site / "flashinfer/data/aot/batch_decode/batch_decode.so").read_bytes() == b"compiled"


def test_without_a_kit_it_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "KIT", tmp_path)
    with pytest.raises(SystemExit, match="make gpu-kit prepares it"):
        offline.main([])


def test_a_kit_that_is_too_large_says_so() -> None:
    assert "Too large" not in size_line(8 << 20, 42 << 20)
    assert "Too large: compile fewer kernels" in size_line(8 << 20, 53 << 20)
    assert 0 < checkout_bytes() < LIMIT_BYTES


def test_kernels_that_are_never_launched_are_not_compiled(tmp_path: Path) -> None:
    """FlashInfer's generated sources, cut to a line each."""
    one = "template cudaError_t Run<{mask}, /*SAME_KV_STRIDES=*/{same}>(Params p);"

    def put(kind: str, mask: int, text: str) -> Path:
        path = tmp_path / f"batch_prefill_{kind}_sm90_kernel_mask_{mask}.cu"
        path.write_text(text)
        return path

    both = "\n".join(one.format(mask="kCausal", same=same) for same in ("true", "false"))
    kept = put("paged", 1, both)
    binding = tmp_path / "binding.cu"
    binding.write_text("binding")
    custom = put("paged", 2, one.format(mask="use_custom_mask", same="true"))
    ragged = put("ragged", 1, both)
    spec = SimpleNamespace(sources=[kept, binding, custom, ragged])
    leave_out_unused(spec, ragged=False)
    assert spec.sources == [kept, binding]
    text = kept.read_text()
    assert "template cudaError_t Run<kCausal, /*SAME_KV_STRIDES=*/true>(Params p);" in text
    assert text.count("{ return cudaErrorNotSupported; }") == 4
    assert "Run<true, /*SAME_KV_STRIDES=*/true>" in text


@pytest.mark.slow
def test_the_runner_runs_from_a_kit(tmp_path: Path) -> None:
    """The kit's packages come before those of the machine; the runner needs no git."""
    put_wheel(tmp_path / "wheels", "kit_one", **{"__init__.py": ""})
    kit, nothing = tmp_path / "kit", tmp_path / "kernels"
    archives.make_archives(tmp_path / "wheels", nothing, kit, tmp_path / "kept", jobs=1)
    places = ("--out", str(tmp_path / "out"), "--models", str(tmp_path / "models"))
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_kit.offline", "--trial", *places, "facts"],
        cwd=ROOT,
        env={
            "GPU_KIT": str(kit),
            "GPU_KIT_UNPACKED": str(tmp_path / "unpacked"),
            "PATH": "/nowhere",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS facts" in ended.stdout
