"""Processors by what their kernels multiply at once: all that this one has, one after the other."""

from __future__ import annotations

import pytest

from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.cpu_kernels.products.tiles import may_use_tiles
from kvrelay.model_runner.attention import cpu_attention
from kvrelay.model_runner.layers import linear

UNITS = ("floats", "pairs", "tiles")
"""A processor without AVX512-BF16, one with it, and one with AMX, too."""


def be_a_processor_of(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels see such a processor; skips the test where this one has no such unit."""
    has_pairs, has_tiles = unit != "floats", unit == "tiles"
    if has_pairs and not has_bfloat16_products():
        pytest.skip("this CPU has no AVX512-BF16")
    if has_tiles and not may_use_tiles():
        pytest.skip("this CPU has no AMX")
    for place in (linear, cpu_attention):
        monkeypatch.setattr(place, "has_bfloat16_products", lambda: has_pairs)
        monkeypatch.setattr(place, "may_use_tiles", lambda: has_tiles)
