"""The arrays of a step at fixed addresses, as CUDA graphs read them.

All arrays of a step lie in one block of device memory, and one copy brings them there from one
piece of pinned memory. Those whose lengths the graph's shape decides come first::

    input ids | positions | for each pool `PoolArrays` | tokens awaited, rows of logits,
                                                         changes of page tables

Page ids are not among them. They are gathered on the device, into memory that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.device.device_streams import StagingSet
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.device_table import take_page_ids
from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.config.cuda_graphs import GraphRoom, GraphShape

HostArray: TypeAlias = npt.NDArray[Any]
MOST_CHANGES: Final = 4
"""The changes of a page table, for each sequence, that come with a step's other arrays."""
_ALIGNMENT: Final = 16
_ROW_BYTES: Final = 40
"""The bytes a token: its id, position, two of an awaited one, and a row of logits."""
_POOL_ROW_BYTES: Final = 8
"""The bytes a token of a pool's arrays."""
_POOL_BYTES: Final = 12
"""The bytes a sequence of a pool's arrays."""


class PoolArrays(NamedTuple):
    """The arrays of one pool in a `StepBlock`, int32 on the device."""

    new_pages: torch.Tensor
    """``[rows]`` pages that new tokens are written to."""
    new_slots: torch.Tensor
    """``[rows]`` places of new tokens in their pages."""
    indptr: torch.Tensor
    """``[size + 1]``, `PagedPlan.kv_indptr`."""
    lengths: torch.Tensor
    """``[size]``, `PagedPlan.last_page_len`, of latents `PagedPlan.kv_lens`."""
    shifts: torch.Tensor
    """``[size]``, as `device_table.page_shifts`."""


class StepArrays(NamedTuple):
    """The arrays whose lengths a graph's shape decides, on the device."""

    input_ids: torch.Tensor
    """``[rows]`` int64"""
    positions: torch.Tensor
    """``[rows]`` int64"""
    pools: Sequence[PoolArrays]


class StepBlock:
    """Device memory for the arrays of one step; all graphs share it.

    Args:
        room: the graphs.
        num_pools: the pools of a step.
        device: the pools' device.
    """

    def __init__(self, room: GraphRoom, num_pools: int, device: torch.device) -> None:
        self._num_pools = num_pools
        a_sequence = num_pools * (_POOL_BYTES + 2 * 4 * MOST_CHANGES)
        a_row = _ROW_BYTES + num_pools * _POOL_ROW_BYTES
        pieces = 5 + 6 * num_pools
        nbytes = a_sequence * room.sizes.largest + a_row * room.most_rows
        nbytes += 2 * _ALIGNMENT * pieces
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """The device memory that is taken, in bytes."""
        return self._memory.nbytes

    def arrays(self, shape: GraphShape) -> StepArrays:
        """The arrays of one graph; those of others lie in the same place.

        `send` writes the first arrays that it is given here, if these have the same lengths.
        """
        int64, rows = np.empty(shape.rows, np.int64), np.empty(shape.rows, np.int32)
        indptr, sequences = np.empty(shape.size + 1, np.int32), np.empty(shape.size, np.int32)
        pool = [rows, rows, indptr, sequences, sequences]
        ids, positions, *others = self._views([int64, int64, *(pool * self._num_pools)])
        pools = [PoolArrays(*others[i : i + 5]) for i in range(0, len(others), 5)]
        return StepArrays(ids, positions, pools)

    def send(self, arrays: Sequence[HostArray], staging: StagingSet) -> list[torch.Tensor]:
        """Copy arrays of the host to the device, by one copy on the current stream.

        Returns:
            The arrays on the device, until the next `send`.
        """
        starts = _starts(arrays)
        packed = np.zeros(starts[-1], np.uint8)
        for array, start in zip(arrays, starts, strict=False):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        staged = torch.from_numpy(staging.put(packed))
        self._memory[: len(packed)].copy_(staged, non_blocking=True)
        return self._views(arrays)

    def _views(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        starts = _starts(arrays)
        assert starts[-1] <= len(self._memory)
        return [
            self._memory[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]


_DTYPES: Final = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def _starts(arrays: Sequence[HostArray]) -> list[int]:
    """The place of each array in a block, and the end of the last one."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


class GraphPages:
    """The page ids of one pool's steps at a fixed address; graphs of all sizes share them.

    Args:
        count: the most page ids of a step.
        device: the pool's device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.ids = torch.zeros(count, dtype=torch.int32, device=device)
        """``[count]`` int32; the first ones are a step's."""
        self._held: tuple[int, Int32Array, Int32Array] | None = None

    def gather(
        self, table: torch.Tensor, version: int, plan: PagedPlan, shifts: Int32Array, at: PoolArrays
    ) -> torch.Tensor:
        """Let `ids` begin with the page ids of `plan`, by work on the current stream.

        Nothing is launched if they are there already.

        Args:
            table: the page table of `DeviceTable`.
            version: the table's.
            plan: the plan.
            shifts: as `page_shifts`.
            at: the same arrays on the device.

        Returns:
            ``[num_pages]``
        """
        ids = self.ids[: plan.num_pages]
        if not self._holds(version, plan.kv_indptr, shifts):
            self._held = None  # if this fails, the contents are unknown
            take_page_ids(table, at.indptr[1:], at.shifts, plan.num_pages, out=ids)
            self._held = version, plan.kv_indptr, shifts
        return ids

    def _holds(self, version: int, indptr: Int32Array, shifts: Int32Array) -> bool:
        if self._held is None or self._held[0] != version:
            return False
        return np.array_equal(self._held[1], indptr) and np.array_equal(self._held[2], shifts)


class GraphBuffers:
    """The memory of all graphs of one model.

    Args:
        geometries: those of its pools.
        room: the graphs, and the longest sequence.
        device: the pools' device.
    """

    def __init__(
        self, geometries: Sequence[KVGeometry], room: GraphRoom, device: torch.device
    ) -> None:
        largest = room.sizes.largest
        self.block = StepBlock(room, len(geometries), device)
        self.pages = [
            GraphPages(largest * one.pages_for(room.max_tokens), device) for one in geometries
        ]
        places = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._query_indptr = {each: places * each for each in {one.each for one in room.shapes}}
        self._latent = [geometry.latent for geometry in geometries]

    @property
    def nbytes(self) -> int:
        """The device memory that is taken, in bytes."""
        pages = sum(one.ids.nbytes for one in self.pages)
        indptr = sum(one.nbytes for one in self._query_indptr.values())
        return self.block.nbytes + pages + indptr

    def of_wrapper(self, pool: int, shape: GraphShape) -> Mapping[str, torch.Tensor]:
        """The buffers that a pool's wrapper for one graph reads, by FlashInfer's names."""
        arrays, ids = self.block.arrays(shape).pools[pool], self.pages[pool].ids
        if not self._latent[pool]:
            return {
                "paged_kv_indptr_buffer": arrays.indptr,
                "paged_kv_indices_buffer": ids,
                "paged_kv_last_page_len_buffer": arrays.lengths,
            }
        return {
            "qo_indptr": self._query_indptr[shape.each][: shape.size + 1],
            "kv_indptr": arrays.indptr,
            "kv_indices": ids,
            "kv_len_arr": arrays.lengths,
        }
