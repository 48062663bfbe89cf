"""The trial of a model's element-wise functions: a row must not depend on the rows beside it.

Such functions seem to be safe, but torch computes the end of each thread's part by other
instructions than the rest, see `InvariantElementwise`. That the functions here do not is found
by trial, because it depends on the machine's torch, its libraries and the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvrelay.model_runner.config.model_config import Activation, ModelConfig
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.batch_invariant import RowwiseProduct
from kvrelay.model_runner.layers.elementwise import (
    Elementwise,
    NormWeight,
    Rotation,
    rms_norm,
    softcap,
)
from kvrelay.model_runner.layers.rotary_embedding import RotaryEmbedding

_TRIED_ROWS = (2, 3, 5, 8, 17, 33, 64)
_MOST_ELEMENTS = 1 << 21
"""The most elements of one trial, so that it takes milliseconds."""
_SEED = 1


class RowFunction(NamedTuple):
    """A function that a model computes row by row."""

    name: str
    function: RowwiseProduct
    rows: tuple[torch.Tensor, ...]
    """A row ``[1, ...]`` of each argument, for its shape and dtype."""


def row_functions(
    config: ModelConfig, elementwise: Elementwise, dtype: torch.dtype
) -> Iterator[RowFunction]:
    """All that a model on a CPU computes row by row, but for products and attention."""
    plain, wide = partial(torch.empty, 1, dtype=dtype), partial(torch.empty, 1)
    heads, dim = config.attention.num_heads, config.attention.rotary_dim
    is_silu = config.activation is Activation.SILU
    activate = elementwise.silu_mul if is_silu else elementwise.gelu_mul
    experts = {layer.moe for layer in config.layers if layer.moe is not None}
    inner = {config.intermediate_size}
    inner |= {one.moe_intermediate_size for one in experts}
    inner |= {one.shared_intermediate_size for one in experts}
    for size in sorted(inner - {0}):  # 0: experts without a shared one
        yield RowFunction("the activation", activate, (plain(2 * size),))
    for weight_dtype in {dtype, torch.float32}:
        ones = partial(torch.ones, dtype=weight_dtype)
        weight = NormWeight(*[ones(config.hidden_size)] * 2)
        norm = partial(elementwise.rms_norm, weight=weight, eps=1e-6)
        yield RowFunction("a norm", norm, (plain(config.hidden_size),))
        head_norm = partial(rms_norm, weight=ones(heads, dim), eps=1e-6)
        yield RowFunction("the norm of heads", head_norm, (plain(heads, dim),))
    rotate = partial(_rotated, elementwise, heads)
    yield RowFunction("rotation", rotate, (plain(heads + 1, dim), wide(dim // 2), wide(dim // 2)))
    for rope in {layer.rope for layer in config.layers}:
        angles = partial(_angles, RotaryEmbedding(rope, dim, torch.device("cpu")))
        yield RowFunction("the angles of positions", angles, (wide(1),))
    for one in experts:
        yield RowFunction("sigmoid", elementwise.sigmoid, (wide(one.n_routed_experts),))
        yield RowFunction("softmax", partial(torch.softmax, dim=-1), (wide(one.n_routed_experts),))
    if config.final_logit_softcapping is not None:
        cap = partial(softcap, most=config.final_logit_softcapping)
        yield RowFunction("the softcap", cap, (wide(config.vocab_size),))


def try_elementwise(config: ModelConfig, elementwise: Elementwise, dtype: torch.dtype) -> None:
    """Compute random rows alone and in batches, with the number of threads that torch has now.

    Raises:
        UnsupportedOptionError: a row's result differs; the message names --batch-invariant.
    """
    for name, function, rows in row_functions(config, elementwise, dtype):
        if not is_rowwise(function, rows):
            raise UnsupportedOptionError(
                f"--batch-invariant: {name} of this machine's torch depends on the batch"
            )


def is_rowwise(
    function: RowwiseProduct, example: Sequence[torch.Tensor], tried: Sequence[int] = _TRIED_ROWS
) -> bool:
    """Whether rows come out the same, to the last bit, alone and in batches of `tried` rows."""
    generator = torch.Generator().manual_seed(_SEED)
    most = min(max(_TRIED_ROWS), max(4, _MOST_ELEMENTS // sum(one.numel() for one in example)))
    rows = [4 * torch.randn(most, *one.shape[1:], generator=generator).to(one) for one in example]
    alone = torch.cat([function(*(one[i : i + 1] for one in rows)) for i in range(most)])
    return all(
        torch.equal(function(*(one[start : start + count] for one in rows)), expected)
        for count in tried
        if count <= most
        for start in (0, most - count)
        for expected in [alone[start : start + count]]
    )


def _rotated(
    elementwise: Elementwise,
    count: int,
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """A rotated copy of ``heads [T, heads, D]``."""
    copy = heads.clone()
    elementwise.rotate(copy, count, Rotation(cos, sin))
    return copy


def _angles(rotary: RotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of ``positions [T, 1]``, stretched to thousands: ``[T, D]``."""
    rotation = rotary((positions[:, 0] * 1000).round())
    return torch.cat((rotation.cos, rotation.sin), dim=1)
