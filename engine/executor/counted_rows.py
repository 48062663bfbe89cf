"""The requests whose tokens are counted on the device, and what a step adds to the counts.

A request with penalties has a row of `TokenCounts`, so that it can be sampled from before the host
knows its previous token. Rows are not freed when requests end. The next request gets the row that
no step has used for the longest, cleared. A request that comes back is counted anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvrelay.device.device_streams import StagingSet
from kvrelay.engine.executor.step_batch import Drafts, Items
from kvrelay.engine.executor.token_state import UNKNOWN, CountedRow, TokenState
from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.sampling.step_sampling import StepSampling
from kvrelay.model_runner.sampling.token_counts import CountChanges, TokenCounts, places_of

_NO_PLACES: Final[Int64Array] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CountedStep:
    """The counts that a step updates before it samples."""

    row_of: Mapping[int, int]
    """The row of each counted item, by its place in the step; for the others the host knows the
    tokens."""
    counts: TokenCounts
    changes: CountChanges
    sampling: StepSampling | None
    """The sampling of the previous step, whose tokens are counted; None: all tokens are known."""

    def count(self) -> None:
        """Update the counts, as work on the stream behind the previous step."""
        self.counts.change(self.changes, None if self.sampling is None else self.sampling.ids)


@dataclass(slots=True)
class _Changes:
    """The changes of a `CountChanges` while they are collected."""

    cleared: list[int] = field(default_factory=list)
    prompt: list[Int64Array] = field(default_factory=list)
    output: list[Int64Array] = field(default_factory=list)
    first_places: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def put(self, staging: StagingSet) -> CountChanges:
        """Copy the changes to where the device can read them."""
        return CountChanges(
            _put(staging, np.array(self.cleared, np.int64)),
            _put(staging, _join(self.prompt)),
            _put(staging, _join(self.output)),
            _put(staging, np.array((self.first_places, self.sources), np.int64)),
        )


class CountedRows:
    """The assignment of count rows to requests. Used on the forward thread.

    Args:
        counts: the rows.
    """

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._holders: OrderedDict[int, CountedRow | None] = OrderedDict.fromkeys(
            range(counts.num_rows)
        )
        """The holder of each row; the row that no step has used for the longest comes first."""

    def has(self, state: TokenState) -> bool:
        """Whether a request's tokens are counted, except at most one that is pending."""
        counted = state.counted
        return counted is not None and self._holders[counted.row] is counted

    def begin(self, items: Items, drafts: Drafts, staging: StagingSet) -> CountedStep | None:
        """Give rows to the items that are sampled with penalties. Returns None if there are none.

        Items that verify drafts get no row, nor do those for which no row is left. The host must
        know their tokens.
        """
        wanted = [
            (place, item.token_state)
            for place, item in enumerate(items)
            if item.sample and item.token_state.params.sampling.reads_output
            if len(item.token_state.choices) == 1 and not drafts[place]
        ]
        if not wanted:
            return None
        held = [state for _, state in wanted if self.has(state)]
        others = [state for _, state in wanted if not self.has(state)]
        for state in held:
            self._use(state)
        changes = _Changes()
        for state in others[: self._counts.num_rows - len(held)]:
            self._give_row(state, changes)
        row_of: dict[int, int] = {}
        sampling: StepSampling | None = None
        for place, state in wanted:
            if self.has(state):
                row_of[place] = self._catch_up(state, changes)
                if state.pending is not None:
                    sampling = state.pending.sampling
        return CountedStep(row_of, self._counts, changes.put(staging), sampling)

    def _use(self, state: TokenState) -> None:
        """Mark a request's row as the one used last, so that no other request gets it first."""
        assert state.counted is not None
        self._holders.move_to_end(state.counted.row)

    def _give_row(self, state: TokenState, changes: _Changes) -> None:
        """Give a request the row that was not used for the longest, with its prompt."""
        row = next(iter(self._holders))
        state.counted = self._holders[row] = CountedRow(row, state.prompt_len)
        self._use(state)
        changes.cleared.append(row)
        if state.params.sampling.repetition_penalty != 1:  # nothing else depends on a prompt
            places = places_of(row, self._counts.vocab, list(state.prompt_ids))
            changes.prompt.append(places)

    def _catch_up(self, state: TokenState, changes: _Changes) -> int:
        """Count what a request has sampled since it was counted last. Returns its row."""
        counted = state.counted
        assert counted is not None
        new_ids = state.token_ids[counted.tokens :]
        counted.tokens = len(state.token_ids)
        if state.pending is not None:
            latest = new_ids.pop()
            assert latest == UNKNOWN
            changes.first_places.append(counted.row * self._counts.vocab)
            changes.sources.append(state.pending.row)
        if new_ids:
            changes.output.append(places_of(counted.row, self._counts.vocab, new_ids))
        return counted.row


def _join(places: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate(places) if places else _NO_PLACES


def _put(staging: StagingSet, array: Int64Array) -> Int64Array:
    """Stage an array, unless it is empty."""
    return staging.put(array) if array.size else array
