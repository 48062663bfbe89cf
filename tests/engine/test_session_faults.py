"""Faults planted into what keeps sessions: the random walk over real schedulers finds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.scheduler.session_turns import SessionTurns
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.session_memory import SessionMemory
from tests.engine.test_sessions import walk
from tests.pairwise import few

SEEDS = (54, 67, 93, *range(40))
"""The first three find what is rare."""
Patch = Callable[[pytest.MonkeyPatch], None]


def lend_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """Histories that differ in one token are taken for the same."""
    shared_len = SessionTurns._shared_len

    def wrong(self: Any, name: Any, input_ids: Any) -> int:
        kept = self._sessions.token_ids(name)
        return min(shared_len(self, name, input_ids) + 1, len(kept), len(input_ids))

    patch.setattr(SessionTurns, "_shared_len", wrong)


def save_what_is_not_written(patch: pytest.MonkeyPatch) -> None:
    """The last token sampled, whose KV no forward has computed, is said to be kept, too."""
    keep = SessionTurns._keep

    def wrong(self: Any, request: Any, name: Any, token_ids: Any) -> Any:
        length = len(token_ids) + self._kv_cache.grow(request.held, len(token_ids) + 1)
        tokens = request.token_ids(0, length)
        return keep(self, request, name, np.asarray(tokens, np.int32))

    patch.setattr(SessionTurns, "_keep", wrong)


def read_into_the_sessions_own_page(patch: pytest.MonkeyPatch) -> None:
    """The boundary page is overwritten before the turn is sure to end well."""
    borrow = SessionMemory.borrow

    def wrong(self: Any, *args: Any, fresh_boundary: bool = False, **options: Any) -> Any:
        return borrow(self, *args, fresh_boundary=False, **options)

    patch.setattr(SessionMemory, "borrow", wrong)


def do_not_put_the_boundary_page_back(patch: pytest.MonkeyPatch) -> None:
    """A turn that was undone leaves the page that its read did not finish."""
    patch.setattr(Lease, "swap_set_aside", lambda self, at: any(map(len, self._set_aside)))


def free_while_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """The forwards and reads of a turn that has ended are forgotten."""
    save, roll_back = LeaseTable.save, LeaseTable.roll_back
    patch.setattr(LeaseTable, "save", lambda self, lease, fences: save(self, lease, ()))
    patch.setattr(
        LeaseTable,
        "roll_back",
        lambda self, lease, prefix_len, fences=(): roll_back(self, lease, prefix_len),
    )


def keep_what_an_aborted_turn_has_added(patch: pytest.MonkeyPatch) -> None:
    """The session says that it has the tokens of before, where the turn had gone back."""
    patch.setattr(SessionMemory, "roll_back", _save_without_trimming)


def _save_without_trimming(self: Any, name: Any, fences: Any = ()) -> Any:
    session = self._lent(name)
    tokens = session.token_ids[: session.lease.kv_committed_len]
    return self.keep(name, session.lease, tokens)


@few(2)
@pytest.mark.parametrize("plant", [
    lend_a_token_too_many,
    save_what_is_not_written,
    read_into_the_sessions_own_page,
    do_not_put_the_boundary_page_back,
    free_while_it_is_written,
    keep_what_an_aborted_turn_has_added,
], ids=lambda plant: plant.__name__)  # fmt: skip
def test_a_planted_fault_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KVCacheError)):
        walk_often()


def walk_often() -> None:
    for seed in SEEDS:
        walk("pair", (None,), seed)
