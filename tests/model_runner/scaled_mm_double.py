"""torch's `scaled_mm` of CUDA devices, without one: it checks what it is given, and is exact.

What it demands is what torch 2.13 documents and checks for a GPU of sm_90: types, strides, and how
scales lie. Its sums are in float64.
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType

FP8 = torch.float8_e4m3fn


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_recipe_a: ScalingType,
    scale_b: torch.Tensor,
    scale_recipe_b: ScalingType,
    *,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    rows, inputs = mat_a.shape
    outputs = mat_b.shape[1]
    assert mat_a.dtype is mat_b.dtype is FP8
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert output_dtype is torch.bfloat16
    assert mat_b.shape[0] == inputs
    assert mat_a.stride() == (inputs, 1), "row-major"
    assert mat_b.stride() == (1, inputs), "column-major"
    assert inputs % 16 == outputs % 16 == 0
    recipes = (scale_recipe_a, scale_recipe_b)
    if recipes == (ScalingType.RowWise, ScalingType.RowWise):
        assert scale_a.shape == (rows, 1)
        assert scale_b.shape == (1, outputs)
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert scale_a.stride(1) == scale_b.stride(1) == 1
        assert use_fast_accum, "the slower of two kernels"
        wide_a, wide_b = scale_a.double(), scale_b.double()
    else:
        assert not use_fast_accum, "each block is added to float32"
        assert recipes == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        assert bias is None
        assert inputs % 128 == outputs % 128 == 0
        assert rows % 4 == 0, "columns of scales begin at multiples of 16 bytes"
        blocks = inputs // 128
        check_columns(scale_a, rows, blocks)
        padded = -(-blocks // 4) * 4
        check_columns(scale_b, padded, outputs // 128)
        wide_a = scale_a.double().repeat_interleave(128, 1)
        wide_b = scale_b[:blocks].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = (mat_a.double() * wide_a) @ (mat_b.double() * wide_b)
    if bias is not None:
        assert bias.dtype is output_dtype
        product += bias
    return product.to(output_dtype)


def check_columns(scales: torch.Tensor, rows: int, columns: int) -> None:
    assert scales.shape == (rows, columns)
    assert scales.stride(0) == 1
    assert scales.stride(1) == rows or columns == 1
