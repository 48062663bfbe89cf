"""The geometry of a page of KV memory, down to its bytes.

Everything outside this room that moves KV (transfer, storage) sees pages as byte spans; only
attention backends see tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # a process that only supervises does without: torch takes long to import
    import torch

Int64Array = npt.NDArray[np.int64]


class PageOrder(StrEnum):
    """The order of pages and layers in a pool."""

    PAGE_FIRST = "page_first"
    """A page's bytes for all layers lie together: one span a page."""
    LAYER_FIRST = "layer_first"
    """All pages of a layer lie together: one span a page and layer."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one page of the layers that share a pool.

    Inside a page and layer the order is ``[parts, num_kv_heads, page_size, head_dim]``, heads
    before tokens. So one head's keys of a page are one contiguous run, which is faster to read on a
    CPU. A tensor-parallel slice of the heads is contiguous, too.
    """

    num_layers: int
    num_kv_heads: int
    """The number of KV heads; 1 for MLA, whatever the number of query heads."""
    head_dim: int
    """The head's size; for MLA ``kv_lora_rank + qk_rope_head_dim``, the latent and its rotary
    key."""
    dtype: torch.dtype
    page_size: int
    order: PageOrder = PageOrder.PAGE_FIRST
    latent: bool = False
    """Whether it is MLA: a token has one latent vector instead of keys and values."""
    window: int | None = None
    """Tokens that these layers look back, including the query's own; None: all of them.

    A token at position ``t`` sees the positions ``(t - window, t]``.
    """
    draft: bool = False
    """Whether the layers are a draft model's, which has pools of its own beside the target's."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "page_size", "window"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if self.latent and self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads of a latent must be 1, got {self.num_kv_heads}")

    @property
    def pool_name(self) -> str:
        """The name of a pool of such pages: a label of its metrics."""
        name = "latent" if self.latent else "full"
        if self.window is not None:
            name = "window"
        return f"draft_{name}" if self.draft else name

    @property
    def parts(self) -> int:
        """The vectors that a head keeps for a token: its key and its value, or one latent."""
        return 1 if self.latent else 2

    @property
    def piece_shape(self) -> tuple[int, int, int, int]:
        """Shape of one page in one layer."""
        return (self.parts, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return math.prod(self.piece_shape) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.layer_page_bytes

    def pages_for(self, tokens: int) -> int:
        """Compute the pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def piece_offsets(self, page_ids: Int64Array, total_pages: int) -> Int64Array:
        """Compute the byte offsets of each (page, layer) piece from the pool's start.

        Shape ``[len(page_ids), num_layers]``; every piece is
        ``layer_page_bytes`` long.
        """
        if self.order is PageOrder.PAGE_FIRST:
            page_stride, layer_stride = self.page_bytes, self.layer_page_bytes
        else:
            page_stride, layer_stride = self.layer_page_bytes, total_pages * self.layer_page_bytes
        layers = np.arange(self.num_layers, dtype=np.int64)
        return page_ids.astype(np.int64)[:, None] * page_stride + layers[None, :] * layer_stride

    def holds_same_tokens_as(self, other: KVGeometry) -> bool:
        """Whether pages of `other` can be copied here: all but the page order must agree."""
        return self == replace(other, order=self.order)
