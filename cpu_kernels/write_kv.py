"""The copying of new keys and values into their pages, compiled for a CPU.

Pages are passed as the pool's flat memory with the offset and stride of a
layer: the same compiled code then runs on both page orders, and knows that a
head's run of a page is contiguous. `decode_attention` reads them in the same way.
"""

from __future__ import annotations

from kvrelay.cpu_kernels.arrays import Array
from kvrelay.cpu_kernels.jit import array_at, kernel


@kernel
def write_kv(
    pages: Array,
    layer_start: int,
    page_stride: int,
    page_size: int,
    new: int,
    shape: tuple[int, int, int],
    num_heads: int,
    page_ids: Array,
    slots: Array,
) -> None:
    """Copy all but the first `num_heads` of ``new [T, heads, D]`` to `slots` of `page_ids`.

    `new` is given by address and shape; its dtype is that of `pages`.
    """
    tokens, heads, head_dim = shape
    source = array_at(new, shape, pages.dtype)
    for row in range(tokens):
        page = layer_start + page_ids[row] * page_stride + slots[row] * head_dim
        for head in range(heads - num_heads):
            at = page + head * page_size * head_dim
            target = pages[at : at + head_dim]
            for i in range(head_dim):
                target[i] = source[row, num_heads + head, i]
