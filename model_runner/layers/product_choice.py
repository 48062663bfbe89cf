"""The choice between ways to multiply bfloat16 on a CPU, by timing them on this machine.

A processor's features do not tell. oneDNN multiplies bfloat16 on any AVX512. Without AVX512-BF16 it
takes five times as long as our kernel, which multiplies float32. So the ways are timed on the
shapes of the model, once a machine::

    <the folder of compiled kernels>/products.json

One process measures while others wait and read: workers of one machine compute the same bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch

from kvrelay.cpu_kernels.kernel_cache import kernel_folder, wait_for_turn
from kvrelay.cpu_kernels.processor import cpu_features, processor_name

logger = logging.getLogger(__name__)


class ProductWay(StrEnum):
    """A way to multiply."""

    OWN = "own"
    """Our kernel, with what the processor multiplies fastest: tiles, pairs, or float32."""
    PACKED = "packed"
    """Our kernel, with weights that stay in 4 bits."""
    ONEDNN = "onednn"
    """oneDNN, with weights that are reordered once."""


Multiply: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Make: TypeAlias = Callable[[torch.Tensor, None], Multiply]
"""Code that makes the product with a weight, without a bias."""
Shape: TypeAlias = tuple[int, ...]
"""Outputs and inputs, and the inputs that share a scale if there are scales."""
_Way = TypeVar("_Way", bound=str)

FEWEST_WEIGHTS: Final = 1 << 16
"""Fewer are not timed: their products are short beside what surrounds them."""
BUDGET_SECONDS: Final = 3.0
"""The most that a model's products are timed; the rest go the first way."""
_MOST_OUTPUTS: Final = 4096
"""The most outputs and inputs of a timed product. Larger ones take proportionally longer."""
_TIMED: Final = ((8, 16), (64, 4))
"""The rows of timed products, and how often each counts: a request of 256 tokens with 128 outputs,
beside seven others."""
_ROUNDS: Final = 3
_HOPELESS: Final = 3.0
"""The multiple of the fastest way's time after which a way is not timed again."""
_CLEARLY: Final = 0.9
"""The part of the first way's time that another may take to be chosen. Noise is not."""


class ProductChoice:
    """The ways of one model's products.

    Args:
        threads: the threads that multiply.
        folder: the folder of the table; None: that of compiled kernels. Where nothing can be kept,
            nothing is timed.
        clock: seconds.
    """

    def __init__(
        self,
        threads: int,
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = folder or kernel_folder()
        self._clock = clock
        self._machine = f"{_describe_machine()}, {threads} threads"
        self._spent = 0.0
        self.chosen: dict[Shape, ProductWay] = {}
        """The way of each shape that was asked for."""

    def find(self, shape: Shape, make: Mapping[ProductWay, Make]) -> ProductWay:
        """Return the fastest way to multiply with weights of `shape`, timing them if need be.

        Args:
            shape: outputs and inputs.
            make: makes the product with a weight, by each way that there is; the likeliest first.
        """
        if shape not in self.chosen:
            self.chosen[shape] = self._find(shape, make)
        return self.chosen[shape]

    def _find(self, shape: Shape, make: Mapping[ProductWay, Make]) -> ProductWay:
        first, *others = make
        outputs, inputs = shape[:2]
        if not others or outputs * inputs < FEWEST_WEIGHTS or self._folder is None:
            return first
        with ExitStack() as turn:
            with suppress(OSError):  # no place for the lock: each process measures for itself
                lock = turn.enter_context((self._folder / "products.lock").open("w"))
                wait_for_turn(lock)
            table, row = _read(self._folder), f"{self._machine}, {describe_shape(shape)}"
            times = table.get(row)
            if not (isinstance(times, dict) and set(times) >= set(make)):
                if self._spent > BUDGET_SECONDS:
                    return first
                times = table[row] = self._measure(shape, make)
                self._write(table)
        fastest = _find_fastest({way: times[way] for way in make})
        said = ", ".join(f"{way} {1e3 * times[way]:.1f} ms" for way in make)
        named = describe_shape(shape)
        logger.info("products of %s are computed by %s (%s)", named, fastest, said)
        return fastest

    def _measure(self, shape: Shape, make: Mapping[ProductWay, Make]) -> dict[str, float]:
        """Return the seconds that a request's products of a `shape` take by each way."""
        outputs, inputs = (min(number, _MOST_OUTPUTS) for number in shape[:2])
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
        ways = {way: one(weight, None) for way, one in make.items()}
        x = {rows: torch.randn(rows, inputs, generator=generator).bfloat16() for rows, _ in _TIMED}
        for multiply in ways.values():
            multiply(x[8][:1])  # compiled, and its memory is there
        begun = self._clock()
        best: dict[tuple[ProductWay, int], float] = {}
        for _ in range(_ROUNDS):
            for rows, _ in _TIMED:
                for way, multiply in ways.items():
                    known = best.get((way, rows))
                    fastest = min((best[key] for key in best if key[1] == rows), default=0.0)
                    if known is None or known <= _HOPELESS * fastest:
                        start = self._clock()
                        multiply(x[rows])
                        took = self._clock() - start
                        best[way, rows] = took if known is None else min(known, took)
        self._spent += self._clock() - begun
        return {way.value: sum(often * best[way, rows] for rows, often in _TIMED) for way in ways}

    def _write(self, table: Mapping[str, Any]) -> None:
        assert self._folder is not None
        made = self._folder / "products.json.new"
        with suppress(OSError):
            made.write_text(json.dumps(table, indent=1))
            made.replace(self._folder / "products.json")


def describe_shape(shape: Shape) -> str:
    """Name a shape of weights, such as `960 x 576`."""
    outputs, inputs, *group = shape
    return f"{outputs} x {inputs}" + "".join(f" by {size}" for size in group)


def measured_ways(folder: Path | None = None) -> dict[str, str]:
    """Return the way of each product that was timed on this machine, by threads and shape.

    Args:
        folder: the folder of the table; None: that of compiled kernels.
    """
    folder = folder or kernel_folder()
    table = {} if folder is None else _read(folder)
    before = f"{_describe_machine()}, "
    return {
        row.removeprefix(before): _find_fastest(times)
        for row, times in table.items()
        if row.startswith(before) and isinstance(times, dict) and times
    }


def _find_fastest(times: Mapping[_Way, float]) -> _Way:
    """Find the way that is clearly faster than the first, or else the first."""
    first = next(iter(times))
    return min(times, key=lambda way: times[way] / (1.0 if way == first else _CLEARLY))


def _read(folder: Path) -> dict[str, Any]:
    try:
        table = json.loads((folder / "products.json").read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _describe_machine() -> str:
    """The processor, what it may do, and with what it multiplies: timings of others are not its."""
    features = hashlib.sha256(",".join(sorted(cpu_features())).encode()).hexdigest()[:8]
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{processor_name()}, {features}, {isa}, torch {torch.__version__}"
