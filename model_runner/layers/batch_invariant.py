"""The promise of --batch-invariant, and who keeps it.

A library picks a kernel by a product's shape. One that splits the inner dimension for a single
row, say, adds in another order than the one for many. So the same token in another batch gets
other logits (He and others, "Defeating nondeterminism in LLM inference", thinkingmachines.ai
2025). No trial shows that a library does not: random rows may miss what is rare.

In this mode rows are computed by kernels of ours, whose order of adding is one by design. They are
`product.py`, `product_float32.py` and `elementwise_rows.py` of `cpu_kernels`. Attention is
computed token by token, as in decode. torch moves numbers, and rounds sums and products of two.
"""

from __future__ import annotations

import torch

from kvrelay.model_runner.errors import UnsupportedOptionError

_DTYPES = (torch.bfloat16, torch.float32)


def check_invariant(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what has no such kernels.

    Raises:
        UnsupportedOptionError: it has none; the message names --batch-invariant and `what`.
    """
    if device.type == "cpu" and dtype in _DTYPES:
        return
    name = str(dtype).removeprefix("torch.")
    raise UnsupportedOptionError(
        "--batch-invariant is for bfloat16 and float32 on a CPU, "
        f"not for {what} in {name} on {device}"
    )
