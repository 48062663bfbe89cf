"""The Triton kernel behind `copy_pages`; the only file of this room that imports triton.

CUDA builds of torch bring triton along; CPU builds do not, and do without this file.
Development installs it there, too: the tests run the kernel through its interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.mem_cache.geometry import Int64Array

BLOCK_WORDS = 1024
"""Words that a program copies: 8 KiB, 64 bytes for each thread of its four warps."""


def copy_pieces(
    source: torch.Tensor, source_pages: Int64Array, target: torch.Tensor, target_pages: Int64Array
) -> None:
    """Copy ``source[source_pages[i]]`` to ``target[target_pages[i]]``, all at once.

    Asynchronous, on the current stream. Checks nothing: a page out of range
    reads or writes other memory.

    Args:
        source: ``[pages, layers, words]`` with any strides of pages and layers.
        source_pages: page ids, at least one.
        target: of the same words and layers, on the same device.
        target_pages: as many page ids, each once.
    """
    _, layers, words = source.shape
    grid = (len(source_pages), layers, triton.cdiv(words, BLOCK_WORDS))
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]
        _copy_pieces[grid](
            source,
            torch.from_numpy(source_pages).to(source.device),
            source.stride(0),
            source.stride(1),
            target,
            torch.from_numpy(target_pages).to(target.device),
            target.stride(0),
            target.stride(1),
            words,
            block_words=BLOCK_WORDS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_pieces(
    source: tl.tensor,
    source_pages: tl.tensor,
    source_page_stride: tl.tensor,
    source_layer_stride: tl.tensor,
    target: tl.tensor,
    target_pages: tl.tensor,
    target_page_stride: tl.tensor,
    target_layer_stride: tl.tensor,
    words: tl.tensor,
    block_words: tl.constexpr,
) -> None:
    """One block of one piece. Pages and layers are 64-bit, or offsets in large pools overflow."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * block_words + tl.arange(0, block_words)
    within = column < words
    source += tl.load(source_pages + pair) * source_page_stride + layer * source_layer_stride
    target += tl.load(target_pages + pair) * target_page_stride + layer * target_layer_stride
    tl.store(target + column, tl.load(source + column, mask=within), mask=within)
