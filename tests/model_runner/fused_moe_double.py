"""FlashInfer's kernel of experts without it: it checks what it is given, and computes in torch.

What it demands is what flashinfer 0.7.2's function and its CUDA sources check: types, shapes, the
order of rows, memory. Its sums are in float64, in the order of a token's choices.
"""

# ruff: noqa: A002 - the parameters have the names of the package's

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.model_runner.graph_double import kernel, launched

FP8 = torch.float8_e4m3fn
BYTES_A_NUMBER = 4
"""Of the workspace, for each of the numbers between a layer's products."""

most_pairs: dict[torch.dtype, int] = {}
"""The most pairs that a process's one runner in FP8 has seen, for each dtype of inputs."""


def find_room(pairs: int, hidden: int, inner: int, dtype: torch.dtype, is_fp8: bool) -> int:
    """The bytes of a workspace; in FP8 those of the most pairs so far."""
    if is_fp8:
        pairs = most_pairs[dtype] = max(pairs, most_pairs.get(dtype, 0))
    return BYTES_A_NUMBER * pairs * (hidden + 3 * inner)


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    use_deepseek_fp8_block_scale: bool = False,
    use_fused_finalize: bool = True,
    device: torch.device | None = None,
) -> int:
    assert device is not None, "the current device's kernels would be asked"
    assert not use_fused_finalize
    assert x_dtype is output_dtype
    assert use_deepseek_fp8_block_scale == (weight_dtype is FP8)
    assert num_experts_total >= top_k
    pairs, is_fp8 = max_num_tokens * top_k, use_deepseek_fp8_block_scale
    return find_room(pairs, hidden_size, intermediate_size, x_dtype, is_fp8)


@launched
def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    use_deepseek_fp8_block_scale: bool = False,
    use_fused_finalize: bool = True,
    workspace_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, hidden = input.shape
    experts, _, inner = fc2_expert_weights.shape
    chosen = token_selected_experts
    biases = [one for one in (fc1_expert_biases, fc2_expert_biases) if one is not None]
    clamps = [one for one in (swiglu_alpha, swiglu_beta, swiglu_limit) if one is not None]
    given = (input, chosen, token_final_scales, fc1_expert_weights, fc2_expert_weights)
    assert output is not None
    assert workspace_buffer is not None
    for one in (*given, *quant_scales, *biases, *clamps, output, workspace_buffer):
        assert one.device == input.device, "another device"
        assert one.is_contiguous()
    assert not use_fused_finalize, "by atomic additions, each time in another order"
    assert output.shape == input.shape
    assert output.dtype is output_dtype is input.dtype
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert chosen.dtype is torch.int32, "read as int32 without a check"
    assert token_final_scales.dtype is torch.float32
    assert chosen.shape == token_final_scales.shape
    assert len(chosen) == tokens > 0
    assert fc1_expert_weights.shape == (experts, 2 * inner, hidden)
    assert fc2_expert_weights.shape == (experts, hidden, inner)
    assert fc1_expert_weights.dtype is fc2_expert_weights.dtype
    assert hidden % 128 == inner % 128 == 0
    assert len(biases) in (0, 2)
    for bias, outputs in zip(biases, (2 * inner, hidden), strict=False):
        assert bias.shape == (experts, outputs)
        assert bias.dtype is input.dtype
    for clamp in clamps:
        assert clamp.dtype is torch.float32
        assert clamp.shape == (experts,)
    if use_deepseek_fp8_block_scale:
        assert fc1_expert_weights.dtype is FP8
        assert [one.dtype for one in quant_scales] == [torch.float32] * 2
        for weight, scales in zip(given[3:], quant_scales, strict=True):
            assert scales.shape == (experts, weight.shape[1] // 128, weight.shape[2] // 128)
    else:
        assert fc1_expert_weights.dtype is input.dtype
        assert not quant_scales
    assert workspace_buffer.dtype in (torch.uint8, torch.int8)
    assert workspace_buffer.ndim == 1
    room = find_room(chosen.numel(), hidden, inner, input.dtype, use_deepseek_fp8_block_scale)
    assert len(workspace_buffer) >= room, "workspace_buffer too small"
    if isinstance(input, FakeTensor):
        return output

    def compute() -> torch.Tensor:
        gate_up, down = (
            weight.double() if scale is None else weight.double() * spread(scale)
            for weight, scale in zip(given[3:], quant_scales or (None, None), strict=True)
        )
        for token in range(tokens):
            total = torch.zeros(hidden, dtype=torch.float64)
            for expert, share in zip(chosen[token], token_final_scales[token], strict=True):
                numbers = gate_up[expert] @ input[token].double()
                if fc1_expert_biases is not None:
                    numbers += fc1_expert_biases[expert].double()
                up, gate = numbers.chunk(2)
                numbers = activated(gate, up, *[clamp[expert].double() for clamp in clamps])
                result = down[expert] @ numbers
                if fc2_expert_biases is not None:
                    result += fc2_expert_biases[expert].double()
                total += share.double() * result
            output[token] = total.to(output_dtype)
        return output

    return kernel(compute)


def activated(gate: torch.Tensor, up: torch.Tensor, *clamps: torch.Tensor) -> torch.Tensor:
    if not clamps:
        return gate * torch.sigmoid(gate) * up
    alpha, beta, limit = clamps
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def spread(scales: torch.Tensor) -> torch.Tensor:
    """Of blocks to numbers."""
    return scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


PACKAGE: Any = SimpleNamespace(
    cutlass_fused_moe=cutlass_fused_moe,
    cutlass_fused_moe_workspace_size=cutlass_fused_moe_workspace_size,
)
"""In place of ``flashinfer.fused_moe``."""
