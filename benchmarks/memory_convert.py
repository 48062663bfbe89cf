"""Speed of `CopyPlan` against a plain copy of the same bytes.

python -m benchmarks.memory_convert
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import click
import numpy as np
import torch

from kvrelay.deploy.options.option_types import INTS
from kvrelay.mem_cache.convert import CopyPlan
from kvrelay.mem_cache.geometry import Int64Array, KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool

BAR = 0.6
"""Fraction of a plain copy's speed that a conversion has to reach..."""
BAR_PIECE_BYTES = 16 << 10
"""...where a page of one layer holds this much or more."""

NUM_LAYERS = 30
TOKEN_BYTES = 1024
"""In one layer: keys and values of 4 heads of 64 in bfloat16."""
ORDERS = (
    (PageOrder.LAYER_FIRST, PageOrder.PAGE_FIRST),
    (PageOrder.PAGE_FIRST, PageOrder.LAYER_FIRST),
    (PageOrder.LAYER_FIRST, PageOrder.LAYER_FIRST),
)


@dataclass(frozen=True)
class Conversion:
    """What copying half of a pool's pages to another pool came to."""

    piece_bytes: int
    """Of a page in one layer."""
    source_order: PageOrder
    target_order: PageOrder
    pages: str
    """``scattered``: random ones in random order on both sides; ``contiguous``: one run on both."""
    layers: str
    """``all``: in one call; ``each``: a call a layer. One plan, whose making is timed, too."""
    gb_per_s: float
    """Bytes copied, not read and written; of the fastest repetition, as is the next."""
    plain_gb_per_s: float
    """Of `torch.Tensor.copy_` between contiguous halves of the same pools."""
    ratio: float
    """The one by the other: a fraction of the plain copy's speed."""
    median_ratio: float
    """Median over the repetitions of each one's speed by that of its own plain copy."""

    @property
    def meets_bar(self) -> bool:
        """Whether it is as fast as it should be, or its pieces too small for the bar."""
        return self.piece_bytes < BAR_PIECE_BYTES or self.ratio >= BAR


def measure_all(
    piece_kib: Sequence[int] = (4, 16, 64),
    *,
    repetitions: int = 9,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> list[Conversion]:
    """Measure every pair of `ORDERS` with every size of a piece; see `measure`."""
    return [
        conversion
        for kib, orders in product(piece_kib, ORDERS)
        for conversion in measure(kib << 10, orders, repetitions=repetitions, devices=devices)
    ]


def measure(
    piece_bytes: int,
    orders: tuple[PageOrder, PageOrder],
    *,
    pool_bytes: int = 256 << 20,
    repetitions: int = 9,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> list[Conversion]:
    """Measure scattered and contiguous pages, all layers at once and each by itself.

    The repetitions of the four and of the plain copy are interleaved, so that
    all see the same machine; one more comes first and does not count.

    Args:
        piece_bytes: of a page in one layer, a multiple of `TOKEN_BYTES`.
        orders: of the pool that is read and of the one that is written.
        pool_bytes: of each pool; half of that has to exceed the caches.
        repetitions: of everything.
        devices: where the pools are, such as ``("cuda", "cpu")``.
    """
    geometry = KVGeometry(NUM_LAYERS, 4, 64, torch.bfloat16, piece_bytes // TOKEN_BYTES)
    total_pages = max(2, pool_bytes // geometry.page_bytes)
    source, target = (
        KVPool(replace(geometry, order=order), total_pages, torch.device(device))
        for order, device in zip(orders, devices, strict=True)
    )
    source.data.fill_(1)
    num_pages = total_pages // 2
    cases = list(product(_page_lists(total_pages, num_pages).items(), _layer_calls().items()))
    plain, *converted = _interleaved_seconds(
        [
            partial(_copy_plainly, source, target, num_pages),
            *(partial(_convert, source, target, lists, calls) for (_, lists), (_, calls) in cases),
        ],
        repetitions,
    )
    gigabytes = num_pages * geometry.page_bytes / 1e9
    return [
        Conversion(
            piece_bytes=piece_bytes,
            source_order=orders[0],
            target_order=orders[1],
            pages=pages,
            layers=layers,
            gb_per_s=gigabytes / min(seconds),
            plain_gb_per_s=gigabytes / min(plain),
            ratio=min(plain) / min(seconds),
            median_ratio=statistics.median(p / s for p, s in zip(plain, seconds, strict=True)),
        )
        for ((pages, _), (layers, _)), seconds in zip(cases, converted, strict=True)
    ]


def _page_lists(total_pages: int, num_pages: int) -> dict[str, tuple[Int64Array, Int64Array]]:
    random = np.random.default_rng(0)
    return {
        "scattered": (
            random.permutation(total_pages)[:num_pages],
            random.permutation(total_pages)[:num_pages],
        ),
        "contiguous": (np.arange(num_pages), np.arange(num_pages)),
    }


def _layer_calls() -> dict[str, list[range]]:
    return {
        "all": [range(NUM_LAYERS)],
        "each": [range(layer, layer + 1) for layer in range(NUM_LAYERS)],
    }


def _convert(
    source: KVPool, target: KVPool, pages: tuple[Int64Array, Int64Array], calls: list[range]
) -> None:
    plan = CopyPlan(source, pages[0], target, pages[1])
    for layers in calls:
        plan.copy(layers)


def _copy_plainly(source: KVPool, target: KVPool, num_pages: int) -> None:
    elements = num_pages * source.geometry.page_bytes // source.data.itemsize
    target.data.flatten()[:elements].copy_(source.data.flatten()[:elements])


def _interleaved_seconds(
    works: Sequence[Callable[[], None]], repetitions: int
) -> list[list[float]]:
    """Seconds of each piece of work, a list of `repetitions` for each."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(1 + repetitions):
        for work, times in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return [times[1:] for times in seconds]


@click.command(context_settings={"show_default": True})
@click.option("--piece-kib", type=INTS, default="4,16,64", help="Sizes of a page in one layer.")
@click.option("--repetitions", type=click.IntRange(min=1), default=9, help="Of each copy.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch.  [default: torch's own]")
@click.option("--source", default="cpu", help="Device of the pool that is read.")
@click.option("--target", default="cpu", help="Device of the pool that is written.")
@click.option("--check", is_flag=True, help="Exit with 1 if any misses the bar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    piece_kib: tuple[int, ...],
    repetitions: int,
    threads: int | None,
    source: str,
    target: str,
    check: bool,
    as_json: bool,
) -> None:
    """Print the speed of layout conversions beside that of a plain copy."""
    if threads is not None:
        torch.set_num_threads(threads)
    found = measure_all(piece_kib, repetitions=repetitions, devices=(source, target))
    click.echo(json.dumps([asdict(one) for one in found]) if as_json else _table(found))
    slow = sum(not one.meets_bar for one in found)
    if check and slow:
        raise click.ClickException(f"{slow} of {len(found)} are below {BAR:.0%} of a plain copy")


def _table(found: list[Conversion]) -> str:
    lines = [
        "| piece | source | target | pages | layers | GB/s | plain | ratio | median ratio |",
        "| ---: | --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.piece_bytes >> 10} KiB | {one.source_order} | {one.target_order} | {one.pages} "
        f"| {one.layers} | {one.gb_per_s:.1f} | {one.plain_gb_per_s:.1f} "
        f"| {one.ratio:.2f} | {one.median_ratio:.2f} |"
        for one in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
