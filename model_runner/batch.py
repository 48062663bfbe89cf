"""The input of one forward: tokens of several sequences laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.model_runner.torch_options import to_device

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PendingIds:
    """Tokens that the step before samples: until it has run, only the device knows them."""

    places: Int64Array
    """``[P]`` indices into the `T` tokens."""
    sources: Int64Array
    """``[P]`` indices into `sampled`."""
    sampled: torch.Tensor
    """``[N]`` int64 on the device: the tokens that the step before has sampled, once it has run."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Ragged input of one forward over `B` sequences and `T` new tokens in all.

    Sequence `b` brings the tokens ``[query_start[b], query_start[b + 1])``; they are the last of
    its `seq_lens[b]` tokens. Their keys and values are written to the pages of each pool's table,
    and earlier ones are read there. Token `t` lies in page ``page_tables[pool][b, t //
    page_size]``.

    The arrays are this step's own snapshot: nothing that the scheduler does
    later changes them.
    """

    input_ids: Int64Array
    """``[T]``; -1 where `pending` has the token. `input_ids_on` has all of them."""
    positions: Int64Array
    """``[T]`` absolute position of each token in its sequence."""
    query_start: Int32Array
    """``[B + 1]``"""
    seq_lens: Int32Array
    """``[B]`` tokens of each sequence once this forward has run."""
    page_tables: tuple[Int32Array, ...]
    """One a pool, ``[B, max_pages]``, a draft model's pools last.

    Entries that are not read may be -1: entries past a sequence's last page, and of pages below a
    window. These end at or before ``first new position - window``.
    """
    logit_rows: Int64Array
    """``[S]`` indices into the `T` tokens whose logits are wanted; may be empty."""
    pending: PendingIds | None = None
    """Tokens that the host does not know yet; None: it knows all."""


def input_ids_on(batch: ForwardBatch, device: torch.device) -> torch.Tensor:
    """``[T]`` token ids of the batch on the device, including those that the host does not know."""
    ids, pending = to_device(batch.input_ids, device), batch.pending
    if pending is None:
        return ids
    places, sources = (to_device(one, device) for one in (pending.places, pending.sources))
    # Not in place: on a CPU they are the batch's own.
    return ids.index_copy(0, places, pending.sampled[sources])


def new_token_slots(
    batch: ForwardBatch, page_table: Int32Array, page_size: int
) -> tuple[Int64Array, Int64Array]:
    """The places of the new tokens: ``[T]`` pages of `page_table`, and ``[T]`` slots in them."""
    owners = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
    page_ids = page_table[owners, batch.positions // page_size]
    return page_ids.astype(np.int64), batch.positions % page_size
