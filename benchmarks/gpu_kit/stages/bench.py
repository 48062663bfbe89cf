"""What stages share: the device, clocks that wait for it, and where figures go."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import torch

from kvrelay.model_runner.torch_options import wait_for_device


@dataclass(frozen=True)
class Bench:
    """The device that a stage measures."""

    device: torch.device
    models: Path
    """The folder of checkpoints with random weights; each is made when it is first needed."""
    figures: Path | None
    """The file that gets a line of JSON for each figure."""
    bytes_per_second: float
    """The ceiling of reads and writes of the device's memory."""
    operations_per_second: float
    """The ceiling of products in bfloat16."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU; on a CPU stages are only tried."""
        return self.device.type == "cuda"

    def figure(self, text: str, **numbers: object) -> None:
        """Print a line that the runner shows, and keep its numbers."""
        print(f"FIGURE {text}", flush=True)
        if self.figures is not None:
            with self.figures.open("a") as file:
                file.write(json.dumps({"text": text, **numbers}) + "\n")

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        wait_for_device(self.device)

    def milliseconds(self, work: Callable[[], object], repeats: int) -> float:
        """Measure the device's time of one call: the median of three rounds of `repeats` calls."""
        for _ in range(3):
            work()
        return statistics.median(self._round(work, repeats) for _ in range(3))

    def _round(self, work: Callable[[], object], repeats: int) -> float:
        self.wait()
        if not self.on_gpu:
            begun = time.perf_counter()
            for _ in range(repeats):
                work()
            return (time.perf_counter() - begun) * 1e3 / repeats
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(repeats):
            work()
        last.record()
        self.wait()
        return float(first.elapsed_time(last)) / repeats

    def host_milliseconds(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Measure the host's time of one call on an idle device: the least of `repeats`."""
        least = float("inf")
        for _ in range(repeats):
            self.wait()
            begun = time.perf_counter()
            work()
            least = min(least, time.perf_counter() - begun)
        self.wait()
        return least * 1e3


def nothing_to_do(reason: str) -> NoReturn:
    """End the stage: what it needs is not here, so it has shown nothing."""
    print(f"NONE {reason}", flush=True)
    sys.exit(0)


def stage_options(stage: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all stages have; `stage` gets them as a `Bench`."""

    @click.option("--device", default="cuda:0", show_default=True)
    @click.option("--models", type=click.Path(path_type=Path), required=True)
    @click.option("--figures", type=click.Path(path_type=Path))
    @click.option("--terabytes-per-second", default=3.0, show_default=True)
    @click.option("--teraflops", default=798.0, show_default=True)
    @functools.wraps(stage)
    def with_bench(
        device: str,
        models: Path,
        figures: Path | None,
        terabytes_per_second: float,
        teraflops: float,
        **others: Any,
    ) -> None:
        ceilings = (terabytes_per_second * 1e12, teraflops * 1e12)
        stage(Bench(torch.device(device), models, figures, *ceilings), **others)

    return with_bench
