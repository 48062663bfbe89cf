"""Which workers are added and removed for a number of each role."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.deploy.controller.changes.wanted import changes_to_reach
from kvrelay.deploy.controller.records.ordered_changes import Changes
from kvrelay.wire.worker_info import WorkerRole

P, D, A = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.AGGREGATED
COUNTS = st.dictionaries(st.sampled_from([P, D]), st.integers(1, 12))


def workers(**counts: int) -> dict[str, WorkerRole]:
    return {
        f"{role}-{number}": WorkerRole(role)
        for role, count in counts.items()
        for number in range(count)
    }


def test_workers_are_added_by_the_lowest_names_that_nobody_has_had():
    staying = workers(prefill=1, decode=2)
    changes = changes_to_reach({P: 3}, staying, {"prefill-1"})
    assert changes == Changes(added=(("prefill-2", P), ("prefill-3", P)))


def test_the_latest_workers_are_removed():
    changes = changes_to_reach({D: 1}, workers(prefill=1, decode=11), set())
    assert changes.added == ()
    assert changes.removed == tuple(f"decode-{number}" for number in range(10, 0, -1))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^aggregated: the cluster has no such workers$"):
        changes_to_reach({A: 1}, workers(prefill=1, decode=1), set())
    with pytest.raises(ValueError, match=r"^decode: must be at least 1, got 0$"):
        changes_to_reach({D: 0}, workers(prefill=1, decode=1), set())
    with pytest.raises(ValueError, match=r"^decode: 65 more; one change adds at most 64$"):
        changes_to_reach({D: 66}, workers(prefill=1, decode=1), set())
    assert len(changes_to_reach({D: 65}, workers(prefill=1, decode=1), set()).added) == 64


@given(steps=st.lists(COUNTS, max_size=6))
def test_any_changes_one_after_the_other_reach_what_was_wanted(steps):
    staying, had = workers(prefill=1, decode=1), set(workers(prefill=1, decode=1))
    expected = Counter(staying.values())
    for wanted in steps:
        changes = changes_to_reach(wanted, staying, had)
        assert not had & {name for name, _ in changes.added}, "a name means one worker for ever"
        assert set(changes.removed) <= staying.keys()
        staying = {name: role for name, role in staying.items() if name not in changes.removed}
        staying.update(changes.added)
        had |= staying.keys()
        expected.update({role: wanted[role] - expected[role] for role in wanted})
        assert Counter(staying.values()) == expected
        assert changes_to_reach(wanted, staying, had) == Changes()
