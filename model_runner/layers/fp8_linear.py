"""Products of FP8 on CUDA devices: inputs are rounded to FP8, too, each row with scales of its own.

So a row's result does not depend on the rows beside it, unless the kernels make it so. Both
products are torch's `scaled_mm`; each class says which scales it needs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from kvrelay.model_runner.config.fp8_weights import BLOCK
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight

FP8_MAX: Final = torch.finfo(FP8).max
_LEAST_SCALE: Final = 1e-12
"""The scale of inputs that are all zeros."""
_MULTIPLE: Final = 16
"""A weight's outputs and inputs are multiples of it: cuBLAS and CUTLASS read 16 bytes at a time."""
_ROW_MULTIPLE: Final = 4
"""The padding of rows with scales of blocks: columns of scales begin at 16 bytes."""
_SCALE_MULTIPLE: Final = 4
"""A weight's blocks along its inputs are padded to it, for the same reason."""
_ROWWISE_CAPABILITY: Final = (8, 9)
_BLOCK_CAPABILITY: Final = (9, 0)
_BLOCK_CUDA: Final = (12, 9)


def fp8_products_lack(weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """The reason why the device cannot multiply `weight` into `dtype`; None if it can."""
    device = weight.values.device
    if device.type != "cuda":
        return f"{device.type} multiplies no FP8"
    if dtype is not torch.bfloat16:
        return f"products of FP8 are in bfloat16, not {str(dtype).removeprefix('torch.')}"
    outputs, inputs = weight.values.shape
    if inputs % (BLOCK if weight.blocks else _MULTIPLE) or outputs % _MULTIPLE:
        return f"a weight of {outputs} outputs and {inputs} inputs"
    return fp8_device_lacks(weight.blocks, device)


def fp8_device_lacks(blocks: bool, device: torch.device) -> str | None:
    """The reason why a CUDA device multiplies no FP8, with scales of `blocks` or of outputs."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _ROWWISE_CAPABILITY:
        return "products of FP8 need a GPU of sm_89 or later"
    if blocks and capability != _BLOCK_CAPABILITY:
        return "products of FP8 with scales of blocks need a GPU of sm_90"
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    if blocks and cuda < _BLOCK_CUDA:
        return "products of FP8 with scales of blocks need torch for CUDA 12.9 or later"
    return None


class RowScaledLinear:
    """A `Linear` with a scale an output; an input row has its own, or the checkpoint's.

    Sums stay in tensor cores, as in vLLM's and SGLang's products: an H100's keep some 14 bits of
    them. Inputs in FP8 have 4. Kernels that add to float32 every few products are slower.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        assert not weight.blocks
        self._weight = weight.values.t()
        self._scales = weight.scales.t().contiguous()
        """``[1, out]``"""
        self._input_scale = weight.input_scale
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        values, scales = quantize_rows(x, self._input_scale)
        product: torch.Tensor = functional.scaled_mm(
            values,
            self._weight,
            scales,
            ScalingType.RowWise,
            self._scales,
            ScalingType.RowWise,
            bias=self._bias,
            output_dtype=x.dtype,
            use_fast_accum=True,
        )
        return product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        return residual + self(x)


class BlockScaledLinear:
    """A `Linear` with a scale for each square of weights; inputs get one a row and `BLOCK` columns.

    The scales of a column lie together, for weights and for inputs. They are padded with zeros to a
    multiple of 4, as torch once gave wrong sums for other numbers.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        assert weight.blocks
        self._outputs = len(weight.values)
        rows, columns = weight.scales.shape
        missing = rows * BLOCK - self._outputs
        self._weight = _pad_rows(weight.values, missing).t()
        padded = functional.pad(weight.scales, (0, -columns % _SCALE_MULTIPLE))
        self._scales = padded.contiguous().t()
        """``[in / BLOCK, ceil(out / BLOCK)]``; ``in / BLOCK`` is rounded up to a multiple of 4."""
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        rows = len(x)
        values, scales = quantize_blocks(functional.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE)))
        product: torch.Tensor = functional.scaled_mm(
            values,
            self._weight,
            scales,
            ScalingType.BlockWise1x128,
            self._scales,
            ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )
        product = product[:rows, : self._outputs].contiguous()
        return product if self._bias is None else product + self._bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        return residual + self(x)


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, N]`` in FP8 and ``[T, 1]`` float32 scales.

    A given `scale` is that of all rows; a number that is too large for it becomes FP8's largest.
    """
    wide = x.to(torch.float32)
    if scale is None:
        scales = _scales_for(wide)
        return (wide / scales).to(FP8), scales
    values = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values, scale.repeat(len(x), 1)


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, N]`` in FP8 and ``[T, N / BLOCK]`` float32 scales; scales of a column are adjacent."""
    wide = x.to(torch.float32).view(len(x), -1, BLOCK)
    scales = _scales_for(wide)
    return (wide / scales).to(FP8).view(x.shape), scales[..., 0].t().contiguous().t()


def _scales_for(wide: torch.Tensor) -> torch.Tensor:
    """The scales with which the largest number of the last dimension becomes FP8's largest."""
    return wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST_SCALE) / FP8_MAX


def _pad_rows(values: torch.Tensor, count: int) -> torch.Tensor:
    """`values` in FP8 with `count` rows of zeros below."""
    # Not every device pads float8.
    return functional.pad(values.view(torch.uint8), (0, 0, 0, count)).view(FP8)
