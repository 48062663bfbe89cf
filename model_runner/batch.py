"""The input of one forward: tokens of several sequences laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Ragged input of one forward over `B` sequences and `T` new tokens in all.

    Sequence `b` brings the tokens ``[query_start[b], query_start[b + 1])``;
    they are the last of its `seq_lens[b]` tokens. Their keys and values are
    written to, and the earlier ones read from, the pages of each pool's table
    (token `t` lies in page ``page_tables[pool][b, t // page_size]``).

    The arrays are this step's own snapshot: nothing that the scheduler does
    later changes them.
    """

    input_ids: Int64Array
    """``[T]``"""
    positions: Int64Array
    """``[T]`` absolute position of each token in its sequence."""
    query_start: Int32Array
    """``[B + 1]``"""
    seq_lens: Int32Array
    """``[B]`` tokens of each sequence once this forward has run."""
    page_tables: tuple[Int32Array, ...]
    """One a pool, ``[B, max_pages]``, a draft model's pools last. Entries past a sequence's
    last page are not read, nor, in a pool with a window, those of pages that end at or before
    ``first new position - window``: they may be -1."""
    logit_rows: Int64Array
    """``[S]`` indices into the `T` tokens whose logits are wanted; may be empty."""


def new_token_slots(
    batch: ForwardBatch, page_table: Int32Array, page_size: int
) -> tuple[Int64Array, Int64Array]:
    """Where the new tokens are written: ``[T]`` pages of `page_table`, ``[T]`` slots in them."""
    owners = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
    page_ids = page_table[owners, batch.positions // page_size]
    return page_ids.astype(np.int64), batch.positions % page_size
