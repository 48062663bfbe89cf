"""kvrelay beside vLLM and SGLang, by one client in turn, where they are installed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from benchmarks.gpu_kit.stages.bench import Bench, nothing_to_do, stage_options
from benchmarks.peers.__main__ import main as compare

LOADS = "256/128@8,256/128@64,1024/64@8,1024/64@64"


@click.command()
@stage_options
@click.option("--vllm", type=click.Path(path_type=Path), required=True)
@click.option("--sglang", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Gets the tables.")
@click.option("--revision", default="", help="Runs of another one are not taken for these.")
def main(bench: Bench, vllm: Path, sglang: Path, out: Path, revision: str) -> None:
    """Compare with the engines that the environments `vllm` and `sglang` have."""
    engines = installed(vllm, sglang)
    if not engines:
        nothing_to_do(f"neither vLLM in {vllm} nor SGLang in {sglang}")
    gpu = torch.cuda.get_device_name(bench.device) if bench.on_gpu else "cpu"
    options = comparison(engines, vllm, sglang, out, f"{revision} {gpu}", bench.device.type)
    compare(options, standalone_mode=False)


def installed(vllm: Path, sglang: Path) -> list[str]:
    """List the engines that are there, by the names that `benchmarks.peers` has for them."""
    servers = sglang.glob("lib/python3*/site-packages/sglang/launch_server.py")
    found = {"vllm": (vllm / "bin" / "vllm").exists(), "sglang": any(servers)}
    return [name for name, is_there in found.items() if is_there]


def comparison(
    engines: Sequence[str], vllm: Path, sglang: Path, out: Path, subject: str, device: str
) -> list[str]:
    """Make the options of `benchmarks.peers`; runs of one `subject` are kept, and gone on with."""
    runs = out / f"peers-{hashlib.sha256(subject.encode()).hexdigest()[:12]}.jsonl"
    return [
        *("--device", device, "--systems", ",".join(("adaptive", "aggregated", *engines))),
        *("--rounds", "2", "--loads", LOADS, "--runs", str(runs), "--page", str(out)),
        *("--vllm", str(vllm), "--sglang", str(sglang)),
    ]


if __name__ == "__main__":
    main()
