"""What `make test` runs of a test with many cases.

Of a product of parameters these are all pairs of values, or, in rooms whose tests compute long,
every value once. `few` says how many cases there are of a test that takes long. The others have
the mark `slow`: `make test-all` runs all. The choice depends on the parameters alone, so that a
test that fails fails again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

SEED: Final = "seed"
SEEDS: Final = 1
"""How many values `make test` has of a parameter of this name: they are all alike."""
COMPUTING: Final = frozenset({"engine", "model_runner"})
"""The folders of tests that have every value of a parameter once, and not every pair."""

Cell = Mapping[str, Hashable]
"""A case of a test: which value each parameter has, or each list of parameters."""


def mark_what_pairs_leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what adds no pair of values to the other cases of the same test."""
    tests: defaultdict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
            continue
        if hasattr(item, "callspec"):
            tests[item.path, item.cls, item.originalname].append(item)
    for cases in tests.values():
        strength = 2 - (cases[0].path.parent.name in COMPUTING)
        kept = sorted(choose([cell_of(case) for case in cases], strength))
        if mark := cases[0].get_closest_marker("few"):
            kept = spread(kept, *mark.args)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.slow)


def cell_of(case: pytest.Function) -> Cell:
    """Tell values apart by identity: all cases of a test have the same objects."""
    params, cell = dict(case.callspec.params), {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        together = [name.strip() for name in names.split(",")]
        cell[names] = tuple(id(params.pop(name)) for name in together if name in params)
    return cell | {name: id(value) for name, value in params.items()}  # of fixtures


def choose(cells: Sequence[Cell], strength: int) -> set[int]:
    """Which of a test's cases are run."""
    seeds = [*dict.fromkeys(cell.get(SEED) for cell in cells)][:SEEDS]
    few = [number for number, cell in enumerate(cells) if cell.get(SEED) in seeds]
    return {few[number] for number in cover([cells[number] for number in few], strength)}


def cover(cells: Sequence[Cell], strength: int) -> list[int]:
    """Which of the cells together have every value, or every pair of values (strength 2)."""
    varying = [name for name in cells[0] if len({cell[name] for cell in cells}) > 1]
    if len(varying) <= strength:  # every cell is a value, or a pair, of its own
        return [*range(len(cells))]
    parts = [
        frozenset(itertools.combinations([(name, cell[name]) for name in varying], strength))
        for cell in cells
    ]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(len(cells)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return chosen


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most so many of them: the first and others at equal distances."""
    return [*numbers[:: -(-len(numbers) // count)]]


def few(count: int) -> pytest.MarkDecorator:
    """Let `make test` run at most so many cases of a test that takes long, spread over the list."""
    return pytest.mark.few(count)


def whole(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a quick test by every combination, all of which `make test` runs.

    For tables: each combination is a row of its own, which no other two rows stand for.
    """
    return pytest.mark.parametrize(",".join(parameters), [*itertools.product(*parameters.values())])


def share(first: Iterable[Any], second: Iterable[Any], *, one_in: int = 2) -> list[ParameterSet]:
    """Both parameters' values, in every combination; all but one in so many are slow tests.

    For two long lists, all pairs of which are the whole product: neighbours in one list meet
    different values of the other.
    """
    return [
        pytest.param(one, other, marks=pytest.mark.slow if (row + column) % one_in else ())
        for (row, one), (column, other) in itertools.product(enumerate(first), enumerate(second))
    ]
