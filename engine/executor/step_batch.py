"""The layout of a step's batch: its tokens, the rows of its logits, and where both lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from kvrelay.device.device_streams import StagingSet
from kvrelay.engine.executor.pending_drafts import PendingDrafts
from kvrelay.engine.executor.step import Scheduled
from kvrelay.engine.executor.token_state import UNKNOWN
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array, PendingIds
from kvrelay.model_runner.sampling.step_sampling import StepSampling
from kvrelay.model_runner.torch_options import pin_to_device
from kvrelay.wire.speeds import StepWork

Drafts: TypeAlias = Sequence[Sequence[int]]
"""Drafted tokens of each item of a step; empty for those without any."""
Items: TypeAlias = Sequence[Scheduled[object]]
"""The items of a step that are computed."""


class LogitRows:
    """The rows of a step's logits that belong to each item.

    The rows of one item follow each other, in the order of the items::

        scored                   | sampled
        one for each token whose | one for each choice, all of | one for each
        follower is scored       | the last known token        | draft

    `make_batch` asks the model for these rows.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """For each row, the place of its token in the batch."""
        self.scored: list[slice] = []
        """For each item, its rows of prompt tokens; may be empty."""
        self.sampled: list[int] = []
        """The rows of all items that are sampled from, or that drafts are verified with."""
        self.first_sampled: list[int] = []
        """The first place of each item in `sampled`; for an item with none, where it would be."""

    def add(self, item: Scheduled[object], draft: Sequence[int], begin: int) -> None:
        """Add the rows of the next item, whose tokens begin at place `begin` in the batch."""
        state, last = item.token_state, begin + item.num_tokens - 1
        first, num_scored = len(self.tokens), 0
        if state.params.prompt_logprobs is not None:
            num_scored = _num_scored(item)
            self.tokens += range(begin, begin + num_scored)
        self.scored.append(slice(first, first + num_scored))
        self.first_sampled.append(len(self.sampled))
        if item.sample and not draft and len(state.choices) == 1:  # nearly all are
            self.tokens.append(last)
            self.sampled.append(first + num_scored)
        elif item.sample:
            self.tokens += [last] * len(state.choices)
            self.tokens += range(last + 1, last + 1 + len(draft))
            self.sampled += range(first + num_scored, len(self.tokens))

    def select_sampled(self, logits: torch.Tensor) -> torch.Tensor:
        """Select the rows of `sampled` from the logits of all rows."""
        if len(self.sampled) == len(self.tokens):
            return logits  # selecting rows copies them
        return logits[pin_to_device(np.array(self.sampled, np.int64), logits.device)]


def make_batch(
    items: Items, drafts: Drafts, page_tables: Sequence[Int32Array]
) -> tuple[ForwardBatch, LogitRows]:
    """Lay the items' next tokens end to end, each item's drafts behind its own tokens.

    Returns:
        The batch, and the rows of logits that belong to each item.
    """
    input_ids: list[int] = []
    starts: list[int] = [0]
    ends: list[int] = []
    rows = LogitRows()
    for item, draft in zip(items, drafts, strict=True):
        state, begin = item.token_state, len(input_ids)
        input_ids += state.token_ids[state.kv_len : state.kv_len + item.num_tokens]
        input_ids += draft
        rows.add(item, draft, begin)
        starts.append(len(input_ids))
        ends.append(state.kv_len + len(input_ids) - begin)
    query_start, last = np.array(starts, np.int32), np.array(ends, np.int64)
    if len(input_ids) == len(ends):  # each brings one, as in nearly all steps
        positions = last - 1
    else:
        # Every token's place in the batch, plus how much further it is in its sequence.
        shifts = np.repeat(last - query_start[1:], np.diff(query_start))
        positions = np.arange(len(input_ids)) + shifts
    batch = ForwardBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=last.astype(np.int32),
        page_tables=tuple(page_tables),
        logit_rows=np.array(rows.tokens, np.int64),
    )
    return batch, rows


@dataclass(frozen=True, slots=True)
class AwaitedIds:
    """The tokens of a batch that only the device knows, as in `PendingIds`.

    `sources` are indices into the pending drafts, behind which the previous step's samples come.
    """

    places: Int64Array
    sources: Int64Array
    sampling: StepSampling | None
    """The sampling of the previous step; None: all of its tokens are known."""
    drafts: PendingDrafts | None

    def put_into(self, batch: ForwardBatch) -> ForwardBatch:
        """Fill the tokens in, by work on the stream behind what makes them."""
        parts = [] if self.drafts is None else [self.drafts.ids]
        if self.sampling is not None:
            parts.append(self.sampling.ids)
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return replace(batch, pending=PendingIds(self.places, self.sources, tokens))


def find_awaited(
    items: Items, batch: ForwardBatch, drafts: PendingDrafts | None, staging: StagingSet
) -> AwaitedIds | None:
    """Find the batch's tokens that are not known yet. Returns None if all are known."""
    found = [
        (begin, pending)
        for item, begin in zip(items, batch.query_start.tolist(), strict=False)
        if (pending := item.token_state.pending) is not None
    ]
    places = [begin for begin, _ in found]
    sources = [pending.row for _, pending in found]
    if drafts is not None:
        # In the order of the items, as their drafts are.
        unknown = np.setdiff1d(np.flatnonzero(batch.input_ids == UNKNOWN), places)
        first = len(drafts.ids)
        sources = [place for own in drafts.sources for place in own] + [
            first + source for source in sources
        ]
        places = [*unknown.tolist(), *places]
    if not places:
        return None
    sampling = found[0][1].sampling if found else None
    put = staging.put
    return AwaitedIds(
        put(np.array(places, np.int64)), put(np.array(sources, np.int64)), sampling, drafts
    )


def stage(batch: ForwardBatch, staging: StagingSet) -> ForwardBatch:
    """Copy the batch to memory that the device can read while the host goes on."""
    return ForwardBatch(
        input_ids=staging.put(batch.input_ids),
        positions=staging.put(batch.positions),
        query_start=staging.put(batch.query_start),
        seq_lens=staging.put(batch.seq_lens),
        page_tables=tuple(map(staging.put, batch.page_tables)),
        logit_rows=staging.put(batch.logit_rows),
    )


def count_work(items: Items, batch: ForwardBatch) -> StepWork:
    """Count what a batch computes, before its tokens advance the items' token states."""
    are_prompts = [item.token_state.in_prompt for item in items]
    if True not in are_prompts:
        return StepWork(rows=len(items), row_pairs=int(batch.seq_lens.sum(dtype=np.int64)))
    in_prompt, ends = np.array(are_prompts), batch.seq_lens.astype(np.int64)
    counts = np.diff(batch.query_start)[in_prompt]
    # Each token attends to those before it and to itself.
    pairs = counts * (2 * ends[in_prompt] - counts + 1) // 2
    rows = ends[~in_prompt]
    return StepWork(int(counts.sum()), int(pairs.sum()), len(rows), int(rows.sum()))


def _num_scored(item: Scheduled[object]) -> int:
    """Count the tokens of a chunk, from its first, whose followers in the prompt are scored.

    Call it for a request that asks for its prompt's log-probabilities.
    """
    state = item.token_state
    if not state.in_prompt:
        return 0
    return max(0, min(item.num_tokens, state.prompt_len - 1 - state.kv_len))
