"""Faults that are planted in the code: a test that finds them would find one like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, run_state_machine_as_test

Plant = Callable[[pytest.MonkeyPatch], None]
"""Breaks the code in one place."""

SEARCH: Final = settings(
    max_examples=1000, stateful_step_count=60, deadline=None, database=None, derandomize=True,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip
"""Random steps, always the same ones."""

BELOW_THE_DEVICE: Final = settings(SEARCH, max_examples=1500)
"""More of them: few come as far as the tiers."""


def in_little_memory(
    *host: int, storage: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates what builds a machine: on a small device, so that the tiers below it are used.

    Args:
        host: pages that the host may have.
        storage: whether there is some below it.
    """
    return initialize(
        kind=st.just("full"),
        page_size=st.sampled_from([1, 3]),
        pages=st.integers(12, 40),
        rows=st.integers(2, 6),
        window=st.just(1),
        long_row=st.sampled_from([2, 8]),
        host=st.sampled_from(host),
        storage=st.just(storage),
    )


class Faults(dict[str, Plant]):
    """Faults, by their names."""

    def add(self, plant: Plant) -> Plant:
        """Decorates a fault."""
        self[plant.__name__] = plant
        return plant


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Call ``around(original, self, ...)`` in place of a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kw: around(original, self, *args, **kw))


def find(
    plant: Plant,
    patch: pytest.MonkeyPatch,
    machine: type[RuleBasedStateMachine],
    search: settings = BELOW_THE_DEVICE,
    *,
    few: int | None = 20,
) -> None:
    """A model-based test of a machine fails with a fault.

    Args:
        plant: the fault.
        patch: takes it out again.
        machine: the test.
        search: how it walks, and how often in all.
        few: begin anew with another seed after so many walks, as one seed may come to a fault
            late; None: never.
    """
    plant(patch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (it may show anywhere)
        _walk(machine, search, few)


def _walk(machine: type[RuleBasedStateMachine], search: settings, few: int | None) -> None:
    if few is None:
        run_state_machine_as_test(machine, settings=search)
        return
    for number in range(search.max_examples // few):
        seeded = seed(number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(seeded, settings=settings(search, max_examples=few))
