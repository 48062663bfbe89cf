"""Matrices of modes, of which `make test` runs a part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def matrix(*factors: Sequence[Any], one_in: int, together: int = 3) -> list[ParameterSet]:
    """Every combination of the factors' values; but for one in so many they are slow tests.

    Those that are not slow have any three values of different factors together (or as many as
    `together` says), so each value, too.
    """
    numbered = list(itertools.product(*(range(len(values)) for values in factors)))
    quick = [cell for cell in numbered if sum(cell) % one_in == 0]
    for some in itertools.combinations(range(len(factors)), together):
        wanted = itertools.product(*(range(len(factors[one])) for one in some))
        assert {tuple(cell[one] for one in some) for cell in quick} == set(wanted), "too few cells"
    return [
        pytest.param(
            *(values[number] for values, number in zip(factors, cell, strict=True)),
            marks=() if cell in quick else pytest.mark.slow,
        )
        for cell in numbered
    ]
