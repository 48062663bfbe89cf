"""`make test` leaves out no pair of values that a test has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tests.pairwise import cell_of, choose, cover, share, whole

FACTORS = {"one": 2, "two": 3, "three": 2, "four": 4}
PRODUCT = [
    dict(zip(FACTORS, cell, strict=True))
    for cell in itertools.product(*map(range, FACTORS.values()))
]


def pairs_of(cells):
    return {pair for cell in cells for pair in itertools.combinations(cell.items(), 2)}


def test_few_cells_have_all_pairs():
    chosen = [PRODUCT[number] for number in cover(PRODUCT)]
    assert pairs_of(chosen) == pairs_of(PRODUCT)
    assert len(chosen) <= 14  # 12 pairs of the two largest


def test_pairs_that_a_test_does_not_have_are_not_missed():
    cells = [cell for cell in PRODUCT if not (cell["one"] and cell["two"])]
    assert pairs_of(cells[number] for number in cover(cells)) == pairs_of(cells)


def test_two_parameters_are_run_whole():
    cells = [{"one": one, "two": two} for one in range(3) for two in range(4)]
    assert choose(cells) == {*range(12)}


def test_of_a_seed_two_values_are_run():
    assert choose([{"seed": seed} for seed in range(9)]) == {0, 1}


def test_a_share_has_every_value_of_both_lists():
    quick = [one.values for one in share("abcd", range(3), one_in=3) if not one.marks]
    assert quick == [("a", 0), ("b", 2), ("c", 1), ("d", 0)]


def test_of_a_table_every_row_is_run():
    mark = whole(one=range(2), two=range(3), three=range(2)).mark
    names, rows = mark.args
    cases: list[Any] = [
        SimpleNamespace(
            callspec=SimpleNamespace(params=dict(zip(names.split(","), row, strict=True))),
            iter_markers=lambda _: [mark],
        )
        for row in rows
    ]
    assert choose([cell_of(case) for case in cases]) == {*range(12)}
