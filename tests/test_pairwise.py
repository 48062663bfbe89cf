"""`make test` leaves out no value, and no pair of values where it can have all, that a test has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tests.pairwise import cell_of, choose, cover, share, spread, whole

FACTORS = {"one": 2, "two": 3, "three": 2, "four": 4}
PRODUCT = [
    dict(zip(FACTORS, cell, strict=True))
    for cell in itertools.product(*map(range, FACTORS.values()))
]


def pairs_of(cells):
    return {pair for cell in cells for pair in itertools.combinations(cell.items(), 2)}


def test_few_cells_have_all_pairs():
    chosen = [PRODUCT[number] for number in cover(PRODUCT, 2)]
    assert pairs_of(chosen) == pairs_of(PRODUCT)
    assert len(chosen) <= 14  # 12 pairs of the two largest


def test_pairs_that_a_test_does_not_have_are_not_missed():
    cells = [cell for cell in PRODUCT if not (cell["one"] and cell["two"])]
    assert pairs_of(cells[number] for number in cover(cells, 2)) == pairs_of(cells)


def test_two_parameters_are_run_whole():
    cells = [{"one": one, "two": two} for one in range(3) for two in range(4)]
    assert choose(cells, 2) == {*range(12)}


def test_where_tests_compute_long_every_value_is_run_once():
    chosen = [PRODUCT[number] for number in choose(PRODUCT, 1)]
    assert {value for cell in chosen for value in cell.items()} == {
        value for cell in PRODUCT for value in cell.items()
    }
    assert len(chosen) == max(FACTORS.values())


def test_of_a_seed_one_value_is_run():
    assert choose([{"seed": seed} for seed in range(9)], 2) == {0}


def test_of_many_cases_a_few_are_run_spread_over_the_list():
    assert spread(range(10), 3) == [0, 4, 8]
    assert spread(range(3), 5) == [0, 1, 2]
    assert spread(range(4), 1) == [0]


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
    assert choose([cell_of(case) for case in cases], 2) == {*range(12)}
