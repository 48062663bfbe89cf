"""A step's products on a CPU with weights of 4 bits, and with the same in bfloat16, in turn.

python -m benchmarks.low_bits

Times are the least CPU milliseconds of all products of a decode step, on one thread. Its layers
have weights of their own, which come from memory, as those of a model do.
"""

from __future__ import annotations

import click
import torch

from benchmarks.in_turn import least_milliseconds
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.processor import describe_processor
from kvrelay.deploy.load_generator.table import table
from kvrelay.model_runner.checkpoint.packed_weight import PackedWeight
from kvrelay.model_runner.layers.linear import Linear, LinearFactory
from kvrelay.model_runner.layers.nibble_linear import NibbleLinear

GROUP = 128
SHAPES = {
    "SmolLM2-360M": ((1600, 960), (960, 960), (5120, 960), (960, 2560)),
    "Llama-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
"""Outputs and inputs of a layer's products, by model; those of the first are in groups of 32."""
LAYERS = {"SmolLM2-360M": 32, "Llama-8B": 4}
TURNS = 5


def make_layers(model: str, cpu_kernels: str) -> list[Linear]:
    """All products of some layers, one after the other."""
    factory = LinearFactory(threads=KernelThreads(1), cpu_kernels=cpu_kernels)
    generator = torch.Generator().manual_seed(0)
    group = 32 if model == "SmolLM2-360M" else GROUP

    def packed(outputs: int, inputs: int) -> PackedWeight:
        shape = (outputs, inputs // group)
        codes = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        scales = (torch.rand(shape, generator=generator) * 2**-5).half().float()
        zeros = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
        return PackedWeight(codes, scales, zeros, bits=4)

    weights = (packed(*shape) for _ in range(LAYERS[model]) for shape in SHAPES[model])
    if cpu_kernels == "packed":
        made = [factory.make_packed(one, None, torch.bfloat16) for one in weights]
        assert all(isinstance(one, NibbleLinear) for one in made)
        return made
    return [factory.make(one.dequantize(torch.bfloat16)) for one in weights]


def measure(model: str, rows: tuple[int, ...]) -> list[list[str]]:
    """A line for each number of rows."""
    ways = {way: make_layers(model, way) for way in ("own", "packed")}
    lines = []
    for count in rows:
        x = {
            inputs: torch.randn(count, inputs).bfloat16()
            for inputs in {shape[1] for shape in SHAPES[model]}
        }

        def step(way: str, x: dict[int, torch.Tensor] = x) -> None:
            shapes = SHAPES[model] * LAYERS[model]
            for linear, (_, inputs) in zip(ways[way], shapes, strict=True):
                linear(x[inputs])

        took = least_milliseconds({way: lambda way=way: step(way) for way in ways}, TURNS)  # type: ignore[misc]
        ratio = f"{took['packed'] / took['own']:.2f}"
        lines.append([str(count), *(f"{took[way]:.1f}" for way in ways), ratio])
    return lines


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)))
@click.option("--rows", multiple=True, type=int, default=(1, 2, 4, 8, 16, 64, 256))
def main(models: tuple[str, ...], rows: tuple[int, ...]) -> None:
    """Print a table for each model's shapes."""
    click.echo(describe_processor())
    for model in models or SHAPES:
        click.echo(f"\n{LAYERS[model]} layers of {model}")
        click.echo(table(["rows", "bfloat16", "4 bits", "ratio"], measure(model, rows)))


if __name__ == "__main__":
    main()
