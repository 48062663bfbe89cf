"""Pages copied between pools: from one page order to the other, between devices, or both.

A pool is seen as *pieces*, ``[pages, layers, words]``: its page order is no more than the strides
of that view, so that one copy of pages to pages serves every pair of orders.
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
"""What is staged for one transfer between devices."""
DMA_BYTES = 28 << 10
"""From this size on a page has a transfer of its own between a host and a GPU, as in vLLM."""
ALL_LAYERS = slice(None)


class CopyPlan:
    """Pages of one pool that go to pages of another, checked once and copied as often as wanted.

    For who copies layer by layer, as layers are computed or arrive: what is the
    same for all layers is done here, and `copy` does the rest. The i-th source
    page goes to the i-th target page. A source page may be named twice, a
    target page may not.

    A plan owns no pages: whoever copies by it sees to it that they are still
    theirs. Of pools on CUDA devices it has its page ids there, too: make it on
    the stream that copies.

    Args:
        source: where the bytes come from.
        source_pages: page ids in `source`, in ``[0, source.total_pages)``.
        target: where they go.
        target_pages: page ids in `target`, as many as `source_pages`.

    Raises:
        ValueError: for pools whose geometries differ in more than the page
            order, lists of different lengths, ids that are no whole numbers or
            out of range, a target page named twice, or pages of one pool that
            are both read and written.
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

        Between hosts it runs on the calling thread, without the GIL while bytes
        move. Where a CUDA device takes part it works on the current stream: bytes
        that go to the device are there for whatever is launched on that stream
        later, and a host's source pages may be written again on return; bytes that
        come to a host are there on return.

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

    A `CopyPlan` that is used once: arguments, errors and what is promised on
    return are those of the plan and its `copy`. Nothing is changed if this raises.
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
    """A pool as ``[pages, layers, words]``, a view; words of 8 bytes where they fit."""
    word = torch.int64 if pool.geometry.layer_page_bytes % 8 == 0 else torch.uint8
    pieces = pool.data.flatten(2).view(word)
    return pieces.transpose(0, 1) if pool.geometry.order is PageOrder.LAYER_FIRST else pieces


class _Pairs(Protocol):
    """Page ids of two pools, pair by pair, made ready for their devices; maybe none."""

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

    It does between its own memory and pinned memory, if a page lies together in both.
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
    """Whole pages, a transfer for each one or for each run of neighbours."""

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
    """Gathers on the source's device, moves what was gathered at once, scatters on the target's.

    A transfer for each piece would be limited by its start, not by the link.
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
            # of pinned memory gives `gathered` to nobody else.
            moved.copy_(gathered, non_blocking=target.device.type != "cpu")
            scatter.copy(moved, target)

    def _parts_of(self, step: int) -> list[tuple[int, _Pairs, _Pairs]]:
        """Of `step` pages each: their number, what gathers them, what scatters them."""
        parts = []
        for start in range(0, len(self._source_pages), step):
            read = self._source_pages[start : start + step]
            written = self._target_pages[start : start + step]
            staged = np.arange(len(read))
            gather = _pairs_on(self._source_device, read, staged)
            parts.append((len(read), gather, _pairs_on(self._target_device, staged, written)))
        return parts


def _staging(pages: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uninitialized ``[pages, layers, words]``; a host's is pinned, which GPUs access directly."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    shape = (pages, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)


class _HostPairs:
    """One page or a few in an assignment of numpy's, which lets go of the GIL.

    Indexing with arrays on both sides would gather into a buffer first, and two
    passes are slower than the loop.
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
        """For small pieces: 8% faster, and slower for all layers of a page."""
        runs = _runs(self._source_pages, self._target_pages)
        return runs or list(zip(_twos(self._source_pages), _twos(self._target_pages), strict=True))


def _runs(source_pages: Int64Array, target_pages: Int64Array) -> list[tuple[Index, Index]]:
    """Neighbours that go to neighbours as slices; none if most pages are alone."""
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
    """An index for every two pages, wherever they lie, and one for the last of an odd number."""
    ids = pages.tolist()
    twos = [_two(*two) for two in zip(ids[::2], ids[1::2], strict=False)]
    return [*twos, *ids[2 * len(twos) :]]


def _two(first: int, second: int) -> Index:
    """Both pages in this order; of a page named twice one, which numpy writes to both targets."""
    step = second - first
    if not step:
        return first
    stop = second + (1 if step > 0 else -1)
    return slice(first, stop if stop >= 0 else None, step)
