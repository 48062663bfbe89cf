"""A layer of experts on a CPU: the ways to compute it, in turn, on one thread.

python -m benchmarks.experts

Times are the least CPU milliseconds of a call. `loop` is what was done before: experts one after
the other, each with two products, an activation, and an addition to its tokens. With a tiny layer
nearly all of the time is what surrounds the products, with real ones it is that of reading the
weights of the experts that were chosen: `read` is the time in which one large product of one row
reads as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import click
import torch

from benchmarks.in_turn import least_milliseconds
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.processor import describe_processor
from kvrelay.deploy.load_generator.table import table
from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.layers.elementwise import Elementwise
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights, RoutedExperts
from kvrelay.model_runner.layers.experts.sliced_experts import SlicedExperts
from kvrelay.model_runner.layers.linear import LinearFactory

EXPERTS, EACH = 128, 8
LAYERS = 48
"""Those of Qwen3-30B-A3B."""
SHAPES = {"64 x 48": (64, 48), "1024 x 384": (1024, 384), "2048 x 768": (2048, 768)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
READ_BYTES, INPUTS = 1 << 28, 2048


@dataclass(frozen=True)
class LoopedExperts:
    """Experts one after the other, as they were computed before."""

    sliced: SlicedExperts
    elementwise: Elementwise

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        total = torch.zeros_like(x)
        hit: list[int] = torch.unique(chosen).tolist()
        for index in hit:
            rows, ranks = torch.where(chosen == index)
            gate_up, down = self.sliced.products[index]
            result = down(self.elementwise.silu_mul(gate_up(x[rows]))) * shares[rows, ranks, None]
            total.index_add_(0, rows, result.to(x.dtype))
        return total


def read_weights(dtype: torch.dtype, hidden: int, inner: int) -> Iterator[ExpertWeights]:
    """Make those of each expert, the same each time."""
    generator = torch.Generator().manual_seed(0)

    def normal(outputs: int, inputs: int) -> torch.Tensor:
        weight = torch.randn(outputs, inputs, generator=generator)
        return (weight / math.sqrt(inputs)).to(dtype)

    for _ in range(EXPERTS):
        yield ExpertWeights(normal(2 * inner, hidden), normal(hidden, inner))


def make_ways(dtype: torch.dtype, hidden: int, inner: int) -> Mapping[str, RoutedExperts]:
    """The ways to compute a layer of this shape."""
    threads, elementwise = KernelThreads(1), make_elementwise(dtype, torch.device("cpu"))

    def make(backend: MoEBackend) -> RoutedExperts:
        factory = ExpertFactory(
            backend, dtype, torch.device("cpu"), LinearFactory(False, threads), elementwise, threads
        )
        return factory.make(read_weights(dtype, hidden, inner), EXPERTS, Activation.SILU)

    linears = LinearFactory(False, threads, "own")
    weights = read_weights(dtype, hidden, inner)
    sliced = SlicedExperts(weights, dtype, linears, elementwise.silu_mul)
    return {
        "loop": LoopedExperts(sliced, elementwise),
        "slices": sliced,
        "grouped_mm": make(MoEBackend.TORCH),
        "own": make(MoEBackend.CPU),
    }


def bytes_per_millisecond() -> float:
    """The weights that one large product of one row reads."""
    weight = torch.ones(READ_BYTES // 2 // INPUTS, INPUTS, dtype=torch.bfloat16)
    product = LinearFactory(False, KernelThreads(1), "own").make(weight)
    x = torch.ones(1, INPUTS, dtype=torch.bfloat16)
    return READ_BYTES / least_milliseconds({"read": lambda: product(x)}, 8)["read"]


def measure(dtype: torch.dtype, shape: str, tokens: list[int], rate: float) -> list[list[str]]:
    """A line for each number of tokens."""
    hidden, inner = SHAPES[shape]
    ways, lines = make_ways(dtype, hidden, inner), []
    for count in tokens:
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(count, hidden, generator=generator).to(dtype)
        chosen = torch.rand(count, EXPERTS, generator=generator).topk(EACH).indices
        shares = torch.rand(count, EACH, generator=generator)
        known = ways["loop"](x, chosen, shares).float()
        for name, way in ways.items():
            error = (way(x, chosen, shares).float() - known).abs().max() / known.abs().max()
            assert error < 0.02, (name, float(error))
        works = {name: partial(way, x, chosen, shares) for name, way in ways.items()}
        took = least_milliseconds(works, 12 if count <= 8 else 4)
        hit = int(chosen.flatten().bincount().count_nonzero())
        read = hit * 3 * hidden * inner * dtype.itemsize / rate
        times = [f"{took[name]:.2f}" for name in ways]
        ratio = f"{took['loop'] / took['own']:.1f}"
        lines.append([str(count), str(hit), *times, ratio, f"{read:.2f}"])
    return lines


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)))
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)))
@click.option("--tokens", multiple=True, type=int, help="The tokens of a step.")
def main(shapes: tuple[str, ...], dtypes: tuple[str, ...], tokens: tuple[int, ...]) -> None:
    """Print a table for each shape, hidden by inner size, and dtype."""
    torch.set_num_threads(1)
    rate = bytes_per_millisecond()
    click.echo(f"{describe_processor()}; one thread reads {rate / 1e6:.1f} GB/s")
    heads = ["tokens", "experts hit", "loop", "slices", "grouped_mm", "own", "loop / own", "read"]
    with torch.inference_mode():
        for dtype in dtypes or DTYPES:
            for shape in shapes or SHAPES:
                lines = measure(DTYPES[dtype], shape, list(tokens or (1, 8, 64, 512)), rate)
                click.echo(f"\n{EXPERTS} experts of {shape}, {EACH} a token, {dtype}, ms a layer:")
                click.echo(table(heads, lines))
                at = [line for line in lines if line[0] == "8"]
                for line in at:
                    before, now = (LAYERS * float(line[index]) for index in (2, 5))
                    click.echo(f"{LAYERS} layers, 8 tokens: {before:.0f} ms before, {now:.0f} now")


if __name__ == "__main__":
    main()
