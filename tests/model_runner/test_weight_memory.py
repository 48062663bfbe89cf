"""Memory of weights: in huge pages, in order, nobody else's."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvrelay.mem_cache.pool import HUGE_PAGE
from kvrelay.model_runner.layers.linear import BLOCK_BYTES, LinearFactory, PanelLinear, WeightMemory


def span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def flags_of(address: int) -> set[str]:
    """What the kernel says of the mapping that has this address."""
    begun = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begun = int(found[1], 16) <= address < int(found[2], 16)
        elif begun and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("the address is not mapped")


def test_one_lies_behind_the_other_from_a_line_of_the_cache_on():
    memory = WeightMemory()
    taken = [memory.take(shape, torch.bfloat16) for shape in ((3, 5), (32, 7, 2), (1,))]
    spans = [span(tensor) for tensor in taken]
    for (_, end), (start, _) in pairwise(spans):
        assert start % 64 == 0
        assert 0 <= start - end < 64
    for value, tensor in enumerate(taken):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in taken] == [[0], [1], [2]]


@pytest.mark.parametrize("nbytes", [BLOCK_BYTES // 2 + 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 1])
def test_what_a_block_has_no_room_for_gets_another(nbytes: int):
    memory = WeightMemory()
    first, second = (memory.take((nbytes,), torch.uint8) for _ in range(2))
    assert first.shape == second.shape == (nbytes,)
    spans = sorted(map(span, (first, second)))
    assert spans[0][1] <= spans[1][0]
    assert first.data_ptr() % HUGE_PAGE == second.data_ptr() % HUGE_PAGE == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="this system has no transparent huge pages",
)
def test_huge_pages_are_asked_for():
    assert "hg" in flags_of(WeightMemory().take((8,), torch.bfloat16).data_ptr())


@pytest.mark.skipif(
    not PanelLinear.supports(torch.empty(16, 32, dtype=torch.bfloat16)),
    reason="products have no weights of this layout here",
)
def test_products_of_a_model_have_theirs_in_the_order_in_which_they_are_made():
    factory = LinearFactory()
    products = [factory.make(torch.randn(outputs, 64).bfloat16()) for outputs in (32, 96, 64)]
    starts = [
        product._weight.data_ptr() for product in products if isinstance(product, PanelLinear)
    ]
    assert starts == [starts[0], starts[0] + 32 * 64 * 2, starts[0] + 128 * 64 * 2]
