"""Experts by FlashInfer's CUTLASS kernels: a whole layer in one call, on CUDA devices.

The kernels have the rows of gates behind the others. They add a token's results by themselves, in
the order of its choices: the faster way, by atomic additions, would give other bits each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from kvrelay.model_runner.config.fp8_weights import BLOCK
from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import ClampedSilu
from kvrelay.model_runner.layers.experts.expert_weights import (
    ExpertActivation,
    ExpertStack,
    ExpertWeights,
)
from kvrelay.model_runner.layers.fp8_linear import fp8_products_lack
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight

_MULTIPLE: Final = 128
"""Inner and hidden size are padded to multiples of it; kernels of FP8 have no others."""
_LEAST_CAPABILITY: Final = (8, 9)
_DTYPES: Final = (torch.bfloat16, torch.float16)
_LEAST_TOKENS: Final = 256
"""The tokens of the smallest workspace."""


def fused_experts_lack(
    dtype: torch.dtype, activation: ExpertActivation, device: torch.device
) -> str | None:
    """The reason why FlashInfer has no kernel for such experts there; None if it has."""
    if device.type != "cuda":
        return f"they need a CUDA device, not {device.type}"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "they need a GPU of sm_89 or later"
    if dtype not in _DTYPES:
        return f"experts are in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if activation is Activation.GELU_TANH:
        return f"no gate of {activation}"
    return None


def stays_in_fp8(weights: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply these weights in FP8: those with scales of blocks on sm_90."""
    return all(
        isinstance(one, Fp8Weight)
        and one.blocks
        and one.values.shape[0] % BLOCK == 0
        and fp8_products_lack(one, dtype) is None
        for one in (weights.gate_up, weights.down)
    )


class FusedWorkspace:
    """The device memory that the layers of a model share, one after the other.

    Each call gets the largest there is. Smaller ones stay for the graphs that were captured with
    them. FlashInfer is asked each time: in FP8 a step needs as much as the largest one before it,
    of any model in the process.
    """

    def __init__(self, package: Any) -> None:
        self._package = package
        self._buffers: list[torch.Tensor] = []

    def take(self, tokens: int, sizes: tuple[int, ...], **options: Any) -> torch.Tensor:
        """Return memory for so many `tokens`; arguments are those of FlashInfer's function."""
        most = _LEAST_TOKENS
        while most < tokens:
            most *= 2
        nbytes = self._package.cutlass_fused_moe_workspace_size(most, *sizes, **options)
        if not self._buffers or len(self._buffers[-1]) < nbytes:
            device = options["device"]
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        return self._buffers[-1]


class FlashInferExperts:
    """The `RoutedExperts` of a layer in bfloat16 or float16, or in FP8 with scales of blocks.

    Args:
        weights: those of each expert; all in FP8 (see `stays_in_fp8`), or none.
        count: the number of experts.
        dtype: the model's.
        activation: the function of their gates.
        package: the module flashinfer.fused_moe.
        workspace: shared by the layers of a model.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        count: int,
        dtype: torch.dtype,
        activation: ExpertActivation,
        package: Any,
        workspace: FusedWorkspace,
    ) -> None:
        self._package = package
        self._workspace = workspace
        values, scales = ExpertStack(count, _MULTIPLE, up_first=True), ExpertStack(count, 1, True)
        self._is_fp8 = False
        for one in weights:
            if isinstance(one.gate_up, Fp8Weight) and isinstance(one.down, Fp8Weight):
                self._is_fp8 = True
                gate_up, down = (
                    weight.values.view(torch.uint8) for weight in (one.gate_up, one.down)
                )
                values.add(ExpertWeights(gate_up, down, one.gate_up_bias, one.down_bias))
                scales.add(ExpertWeights(one.gate_up.scales, one.down.scales))
            else:
                values.add(one)
        kind = FP8 if self._is_fp8 else dtype
        self._gate_up, self._down = values.gate_up.view(kind), values.down.view(kind)
        self._biases = values.gate_up_bias, values.down_bias
        self._scales = [scales.gate_up, scales.down] if self._is_fp8 else []
        self._hidden, self._inner = self._down.shape[1:]
        self._count = count
        self._clamp: dict[str, torch.Tensor] = {}
        if isinstance(activation, ClampedSilu):
            each = torch.ones(count, dtype=torch.float32, device=self._down.device)
            self._clamp = {
                "swiglu_alpha": each * activation.slope,
                "swiglu_beta": each,
                "swiglu_limit": each * activation.most,
            }

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        hidden = x.shape[1]
        if hidden != self._hidden:
            x = torch.nn.functional.pad(x, (0, self._hidden - hidden))
        workspace = self._workspace.take(
            len(x),
            (self._hidden, self._inner, self._count, chosen.shape[1]),
            x_dtype=x.dtype,
            weight_dtype=self._down.dtype,
            output_dtype=x.dtype,
            use_deepseek_fp8_block_scale=self._is_fp8,
            use_fused_finalize=False,
            device=x.device,
        )
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._package.cutlass_fused_moe(
            x,
            chosen.to(torch.int32),
            shares,
            self._gate_up,
            self._down,
            x.dtype,
            quant_scales=self._scales,
            fc1_expert_biases=self._biases[0],
            fc2_expert_biases=self._biases[1],
            output=out,
            use_deepseek_fp8_block_scale=self._is_fp8,
            use_fused_finalize=False,
            workspace_buffer=workspace,
            **self._clamp,
        )
        return out if hidden == self._hidden else out[:, :hidden].contiguous()
