"""The copying of pages between pools: between page orders, between devices, or both.

A pool is seen as *pieces*, ``[pages, layers, words]``. Its page order is no more than the strides
of that view, so one copy of pages to pages serves every pair of orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.device.cuda_streams import record_event
from kvrelay.mem_cache.geometry import Int64Array, PageOrder
from kvrelay.mem_cache.pool import KVPool

PageIds = Sequence[int] | npt.NDArray[np.integer[Any]]
Index = int | slice

STAGED_BYTES = 32 << 20
"""The most bytes staged for one transfer between devices."""
DMA_BYTES = 28 << 10
"""The size from which a page has a transfer of its own between a host and a GPU, as in vLLM."""
ALL_LAYERS = slice(None)


class CopyPlan:
    """Pages of one pool that go to pages of another, checked once and copied any number of times.

    It is meant for copies layer by layer, as layers are computed or arrive. Work that is the same
    for all layers is done here, and `copy` does the rest. The i-th source page goes to the i-th
    target page. A source page may be named twice, a target page may not.

    A plan owns no pages: its user must make sure that they still have the same owner. For pools on
    CUDA devices it also keeps its page ids there. So make it on the stream that copies.

    Args:
        source: the pool to copy from.
        source_pages: page ids in `source`, in ``[0, source.total_pages)``.
        target: the pool to copy to.
        target_pages: page ids in `target`, as many as `source_pages`.

    Raises:
        ValueError: the pools' geometries differ in more than the page order, or the lists in
            length. Or ids are not whole numbers, or out of range. Or a target page is named twice,
            or pages of one pool are both read and written.
    """

    def __init__(
        self, source: KVPool, source_pages: PageIds, target: KVPool, target_pages: PageIds
    ) -> None:
        if not source.geometry.holds_same_tokens_as(target.geometry):
            raise ValueError(
                f"target differs from source in more than the page order: "
                f"{target.geometry} against {source.geometry}"
            )
        read = _checked_pages("source_pages", source_pages, source.total_pages)
        written = _checked_pages("target_pages", target_pages, target.total_pages)
        _check_pairs(read, written, in_one_pool=source is target)
        self._source, self._target = _pieces(source), _pieces(target)
        # In the order of addresses on the side where pages lie closer together: 10% faster.
        source_is_denser = self._source.stride(0) < self._target.stride(0)
        order = np.argsort(read if source_is_denser else written)
        self._pairs = _pairs_between(
            source.data.device, read[order], target.data.device, written[order]
        )
        self._whole_pages: _Pairs | None = None
        if _moves_by_dma(source, target):
            self._whole_pages = _DmaPairs(read[order], written[order])

    def copy(self, layers: range | None = None) -> None:
        """Copy the bytes that the source's pages have now.

        Between hosts it runs on the calling thread, and releases the GIL while bytes move.

        With a CUDA device it works on the current stream. Bytes that go to the device are there for
        later work on that stream, and a host's source pages may be written again on return. Bytes
        that come to a host are there on return.

        Args:
            layers: the layers to copy; None: all.

        Raises:
            ValueError: for layers that the pools do not have; nothing is changed.
        """
        layers = _checked_layers(layers, self._source.shape[1])
        if self._whole_pages is not None and len(layers) == self._source.shape[1]:
            self._whole_pages.copy(self._source, self._target)
        elif layers:
            chosen = slice(layers.start, layers.stop, layers.step)
            self._pairs.copy(self._source, self._target, chosen)


def copy_pages(
    source: KVPool,
    source_pages: PageIds,
    target: KVPool,
    target_pages: PageIds,
    *,
    layers: range | None = None,
) -> None:
    """Copy pages from one pool to another, whatever their page orders, devices and sizes.

    It is a `CopyPlan` that is used once. Arguments, errors and guarantees on return are those of
    the plan and its `copy`. Nothing is changed if this raises.
    """
    CopyPlan(source, source_pages, target, target_pages).copy(layers)


def _checked_layers(layers: range | None, num_layers: int) -> range:
    if layers is None:
        return range(num_layers)
    if layers and (min(layers) < 0 or max(layers) >= num_layers):
        raise ValueError(f"layers {layers} are not all within [0, {num_layers})")
    return layers if layers.step > 0 else layers[::-1]


def _checked_pages(name: str, pages: PageIds, total_pages: int) -> Int64Array:
    ids = np.asarray(pages)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a flat list of page ids")
    for page in ids[(ids < 0) | (ids >= total_pages)].tolist():
        raise ValueError(f"{name} names page {page}, the pool has [0, {total_pages})")
    return ids.astype(np.int64)


def _check_pairs(read: Int64Array, written: Int64Array, *, in_one_pool: bool) -> None:
    if len(read) != len(written):
        raise ValueError(f"{len(read)} source_pages cannot go to {len(written)} target_pages")
    if len(set(written.tolist())) < len(written):
        ids, counts = np.unique(written, return_counts=True)
        raise ValueError(f"target_pages names twice: {ids[counts > 1].tolist()}")
    if in_one_pool and np.isin(read, written).any():
        both = np.intersect1d(read, written).tolist()
        raise ValueError(f"target_pages and source_pages of one pool share {both}")


def _pieces(pool: KVPool) -> torch.Tensor:
    """View a pool as ``[pages, layers, words]``; words of 8 bytes where they fit."""
    word = torch.int64 if pool.geometry.layer_page_bytes % 8 == 0 else torch.uint8
    pieces = pool.data.flatten(2).view(word)
    return pieces.transpose(0, 1) if pool.geometry.order is PageOrder.LAYER_FIRST else pieces


class _Pairs(Protocol):
    """An interface for pairs of page ids of two pools, prepared for their devices; may be empty."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, layers: slice = ALL_LAYERS) -> None:
        """Copy `layers` between ``[pages, layers, words]`` that differ in pages and strides."""
        ...


def _pairs_between(
    source_device: torch.device,
    source_pages: Int64Array,
    target_device: torch.device,
    target_pages: Int64Array,
) -> _Pairs:
    if source_device == target_device:
        return _pairs_on(source_device, source_pages, target_pages)
    return _StagedPairs(source_device, source_pages, target_device, target_pages)


def _pairs_on(device: torch.device, source_pages: Int64Array, target_pages: Int64Array) -> _Pairs:
    if device.type == "cpu":
        return _HostPairs(source_pages, target_pages)
    from kvrelay.mem_cache.convert_triton import DevicePairs

    return DevicePairs(device, source_pages, target_pages)


def _moves_by_dma(source: KVPool, target: KVPool) -> bool:
    """Whether a GPU moves whole pages between two pools by itself, without the host's processor.

    It does between its own memory and pinned memory, if each page is contiguous in both.
    """
    host, device = source.data, target.data
    if host.device.type != "cpu":
        host, device = device, host
    return (
        (host.device.type, device.device.type) == ("cpu", "cuda")
        and source.geometry.order is target.geometry.order is PageOrder.PAGE_FIRST
        and source.geometry.page_bytes >= DMA_BYTES
        and host.is_pinned()
    )


class _DmaPairs:
    """Pairs of whole pages, with one transfer for each page or each run of adjacent pages."""

    def __init__(self, source_pages: Int64Array, target_pages: Int64Array) -> None:
        self._pairs = _runs(source_pages, target_pages) or list(
            zip(source_pages.tolist(), target_pages.tolist(), strict=True)
        )

    def copy(self, source: torch.Tensor, target: torch.Tensor, layers: slice = ALL_LAYERS) -> None:
        assert layers == ALL_LAYERS, "a part of a page is staged"
        for read, written in self._pairs:
            target[written].copy_(source[read], non_blocking=True)
        # On return the host's pages may be used again, or are there.
        device = source.device if source.device.type == "cuda" else target.device
        record_event(device).wait()


class _StagedPairs:
    """Pairs that are gathered on the source's device, moved at once, and scattered on the target's.

    With a transfer for each piece the start of transfers would be the limit, not the link.
    """

    def __init__(
        self,
        source_device: torch.device,
        source_pages: Int64Array,
        target_device: torch.device,
        target_pages: Int64Array,
    ) -> None:
        self._source_device, self._target_device = source_device, target_device
        self._source_pages, self._target_pages = source_pages, target_pages
        # By the pages of a part, which depend on how many layers are copied.
        self._parts: dict[int, list[tuple[int, _Pairs, _Pairs]]] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor, layers: slice = ALL_LAYERS) -> None:
        source, target = source[:, layers], target[:, layers]
        step = max(1, STAGED_BYTES // source[0].nbytes)
        if step not in self._parts:
            self._parts[step] = self._parts_of(step)
        for pages, gather, scatter in self._parts[step]:
            gathered = _staging(pages, source, source.device)
            gather.copy(source, gathered)
            moved = _staging(pages, source, target.device)
            # To a GPU it moves while the next part is gathered; until then the allocator
            # of pinned memory does not reuse `gathered`.
            moved.copy_(gathered, non_blocking=target.device.type != "cpu")
            scatter.copy(moved, target)

    def _parts_of(self, step: int) -> list[tuple[int, _Pairs, _Pairs]]:
        """Divide into parts of `step` pages, each as its number of pages, gather and scatter."""
        parts = []
        for start in range(0, len(self._source_pages), step):
            read = self._source_pages[start : start + step]
            written = self._target_pages[start : start + step]
            staged = np.arange(len(read))
            gather = _pairs_on(self._source_device, read, staged)
            parts.append((len(read), gather, _pairs_on(self._target_device, staged, written)))
        return parts


def _staging(pages: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate ``[pages, layers, words]``; a host's memory is pinned, for direct access by GPUs."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    shape = (pages, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)


class _HostPairs:
    """Pairs of one page or a few, copied by numpy assignments, which release the GIL.

    Indexing with arrays on both sides would first gather into a buffer, and two passes are slower
    than the loop.
    """

    def __init__(self, source_pages: Int64Array, target_pages: Int64Array) -> None:
        self._source_pages, self._target_pages = source_pages, target_pages

    def copy(self, source: torch.Tensor, target: torch.Tensor, layers: slice = ALL_LAYERS) -> None:
        # Views of numpy's: torch's take 4% of the time of 4 MiB.
        read_from, write_to = source.numpy()[:, layers], target.numpy()[:, layers]
        indices = self._one_by_one
        if read_from.shape[1] == 1:
            # Without a dimension of one an assignment is 60 ns faster.
            read_from, write_to, indices = read_from[:, 0], write_to[:, 0], self._two_by_two
        for read, written in indices:
            write_to[written] = read_from[read]

    @cached_property
    def _one_by_one(self) -> list[tuple[Index, Index]]:
        runs = _runs(self._source_pages, self._target_pages)
        return runs or list(
            zip(self._source_pages.tolist(), self._target_pages.tolist(), strict=True)
        )

    @cached_property
    def _two_by_two(self) -> list[tuple[Index, Index]]:
        """Indices of two pages each: 8% faster for small pieces, slower for whole pages."""
        runs = _runs(self._source_pages, self._target_pages)
        return runs or list(zip(_twos(self._source_pages), _twos(self._target_pages), strict=True))


def _runs(source_pages: Int64Array, target_pages: Int64Array) -> list[tuple[Index, Index]]:
    """Make slices of adjacent pages that go to adjacent pages; none if most pages are alone."""
    source_steps, target_steps = np.diff(source_pages), np.diff(target_pages)
    breaks = (source_steps != 1) | (target_steps != 1)
    if 2 * np.count_nonzero(breaks) >= len(source_pages):
        return []
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(starts, append=len(source_pages)).tolist()
    firsts = zip(source_pages[starts].tolist(), target_pages[starts].tolist(), strict=True)
    return [
        (slice(read, read + length), slice(written, written + length))
        for (read, written), length in zip(firsts, lengths, strict=True)
    ]


def _twos(pages: Int64Array) -> list[Index]:
    """Make an index for every two pages, and one for the last of an odd number."""
    ids = pages.tolist()
    twos = [_two(*two) for two in zip(ids[::2], ids[1::2], strict=False)]
    return [*twos, *ids[2 * len(twos) :]]


def _two(first: int, second: int) -> Index:
    """Make an index of both pages in this order; the same page twice is written to both targets."""
    step = second - first
    if not step:
        return first
    stop = second + (1 if step > 0 else -1)
    return slice(first, stop if stop >= 0 else None, step)
