"""The Triton kernel behind `CopyPlan`; the only file of this room that imports triton.

CUDA builds of torch include triton. CPU builds do not, and do not need this file. Development
installs it there, too: the tests run the kernel through its interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.mem_cache.geometry import Int64Array

BLOCK_WORDS = 1024
"""Words that a program copies: 8 KiB, 64 bytes for each thread of its four warps."""


class DevicePairs:
    """Pages of two pools on one device: ``source_pages[i]`` goes to ``target_pages[i]``.

    Asynchronous, on the current stream. Checks nothing: a page out of range
    reads or writes other memory.
    """

    def __init__(
        self, device: torch.device, source_pages: Int64Array, target_pages: Int64Array
    ) -> None:
        self._source_pages = _to_device(source_pages, device)
        self._target_pages = _to_device(target_pages, device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, layers: slice = slice(None)) -> None:
        """Copy all pairs at once between ``[pages, layers, words]`` of any strides."""
        source, target = source[:, layers], target[:, layers]
        _, num_layers, words = source.shape
        grid = (len(self._source_pages), num_layers, triton.cdiv(words, BLOCK_WORDS))
        if 0 in grid:
            return
        with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]
            _copy_pieces[grid](
                source,
                self._source_pages,
                source.stride(0),
                source.stride(1),
                target,
                self._target_pages,
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
    """Copy one block of one piece. Pages and layers are 64-bit, as large pools need."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * block_words + tl.arange(0, block_words)
    within = column < words
    source += tl.load(source_pages + pair) * source_page_stride + layer * source_layer_stride
    target += tl.load(target_pages + pair) * target_page_stride + layer * target_layer_stride
    tl.store(target + column, tl.load(source + column, mask=within), mask=within)


def _to_device(pages: Int64Array, device: torch.device) -> torch.Tensor:
    """Copy to the device by work on the current stream, which the host does not wait for."""
    tensor = torch.from_numpy(pages)
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()  # torch does not reuse it until the copy has run
    return tensor.to(device, non_blocking=True)
