"""The choice of the code that computes a model's experts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.config.fp8_weights import Fp8Weights, ScaleShape
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.elementwise import Elementwise
from kvrelay.model_runner.layers.experts.cpu_experts import CpuExperts, ExpertScratch
from kvrelay.model_runner.layers.experts.expert_weights import (
    ExpertActivation,
    ExpertWeights,
    RoutedExperts,
    make_activation,
)
from kvrelay.model_runner.layers.experts.flashinfer_experts import (
    FlashInferExperts,
    FusedWorkspace,
    fused_experts_lack,
    stays_in_fp8,
)
from kvrelay.model_runner.layers.experts.grouped_experts import (
    GroupedExperts,
    grouped_products_wait,
    has_grouped_products,
)
from kvrelay.model_runner.layers.experts.sliced_experts import SlicedExperts
from kvrelay.model_runner.layers.fp8_linear import fp8_device_lacks, fp8_products_lack
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.layers.linear import LinearFactory, WeightMemory

logger = logging.getLogger(__name__)


def experts_wait(
    backend: MoEBackend, fp8: Fp8Weights | None, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The reason why experts make the host wait for the device, so that no graph has them.

    Args:
        backend: the user's choice.
        fp8: the checkpoint's quantization, if it has one.
        dtype: the model's.
        device: the model's.
    """
    if backend is MoEBackend.FLASHINFER:
        return None
    if device.type == "cpu" and backend is not MoEBackend.TORCH:
        return "a CPU computes them"
    if device.type == "cuda" and _may_multiply_fp8(fp8, dtype, device):
        return "in FP8 the host chooses which run, unless by --moe-backend flashinfer"
    if not has_grouped_products(device, dtype):
        return f"torch has no grouped products of {str(dtype).removeprefix('torch.')} there"
    if grouped_products_wait(device):
        return "torch's grouped products wait for the host, but on sm_90 and sm_100"
    return None


def _may_multiply_fp8(fp8: Fp8Weights | None, dtype: torch.dtype, device: torch.device) -> bool:
    if fp8 is None or dtype is not torch.bfloat16:
        return False
    return fp8_device_lacks(fp8.scales is ScaleShape.BLOCK, device) is None


def refuse_experts(
    backend: MoEBackend,
    dtype: torch.dtype,
    device: torch.device,
    activation: ExpertActivation,
    batch_invariant: bool,
) -> None:
    """Raise `UnsupportedOptionError`, which names the option, where a choice cannot be had."""
    if batch_invariant and backend not in (MoEBackend.AUTO, MoEBackend.CPU):
        raise UnsupportedOptionError(f"--batch-invariant is not for --moe-backend {backend}")
    if backend is MoEBackend.CPU and not CpuExperts.supports(device, dtype):
        raise UnsupportedOptionError(
            f"--moe-backend cpu has no kernels for {dtype} on {device.type}"
        )
    if backend is MoEBackend.FLASHINFER and (lack := fused_experts_lack(dtype, activation, device)):
        raise UnsupportedOptionError(f"--moe-backend flashinfer: {lack}")


class ExpertFactory:
    """The factory of one model's experts.

    Args:
        backend: the user's choice.
        dtype: the model's.
        device: the model's.
        linears: makes the products of experts that are computed one by one.
        elementwise: the model's, for activations.
        threads: the threads of our kernels.
        flashinfer: the module flashinfer.fused_moe, for that choice.
    """

    def __init__(
        self,
        backend: MoEBackend,
        dtype: torch.dtype,
        device: torch.device,
        linears: LinearFactory,
        elementwise: Elementwise,
        threads: KernelThreads,
        flashinfer: Any | None = None,
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._linears = linears
        self._elementwise = elementwise
        self._threads = threads
        self._flashinfer = flashinfer
        self._memory = WeightMemory()
        self._scratch = ExpertScratch()
        self._workspace = FusedWorkspace(flashinfer)
        self._has_warned = False
        self._has_made = False
        # Bits of float32 must not depend on --cpu-kernels.
        prefers_own = dtype is torch.float32 or linears.prefers_own
        has_own = prefers_own and CpuExperts.supports(device, dtype)
        self._is_own = backend is MoEBackend.CPU or (
            backend is MoEBackend.AUTO and (linears.batch_invariant or has_own)
        )

    @property
    def arithmetic(self) -> str:
        """The way that adds in another order than `auto`'s; empty: no experts were made by one."""
        by_torch = self._has_made and self._backend is MoEBackend.TORCH
        return "experts-torch" if by_torch else ""

    def make(
        self, weights: Iterable[ExpertWeights], count: int, activation: ExpertActivation
    ) -> RoutedExperts:
        """The experts of a layer, of `count` weights, which are taken one after the other.

        Raises:
            UnsupportedOptionError: the user's choice cannot be had; the message names it.
        """
        refuse_experts(
            self._backend, self._dtype, self._device, activation, self._linears.batch_invariant
        )
        self._has_made = True
        first, weights = _peek(weights)
        if self._backend is MoEBackend.FLASHINFER:
            if self._flashinfer is None:
                raise UnsupportedOptionError(
                    "--moe-backend flashinfer is not for transformers' model code (--model-code)"
                )
            return self._make_fused(first, weights, count, activation)
        if self._is_own:
            return self._make_own(weights, count, activation)
        activate = make_activation(activation, self._elementwise)
        is_grouped = has_grouped_products(self._device, self._dtype)
        if is_grouped and not self._multiplies_fp8(first) and not self._is_left_to_linears:
            grouped = GroupedExperts(self._plain(weights), count, self._dtype, activate)
            self._linears.count(grouped.num_weights, own=False)
            return grouped
        return SlicedExperts(weights, self._dtype, self._linears, activate)

    @property
    def _is_left_to_linears(self) -> bool:
        """Whether the ways of single products are better: on a CPU that has none of ours."""
        return self._device.type == "cpu" and self._backend is not MoEBackend.TORCH

    def _multiplies_fp8(self, weights: ExpertWeights) -> bool:
        return any(
            isinstance(one, Fp8Weight) and fp8_products_lack(one, self._dtype) is None
            for one in (weights.gate_up, weights.down)
        )

    def _plain(self, weights: Iterable[ExpertWeights]) -> Iterator[ExpertWeights]:
        return (one.dequantize(self._dtype) for one in weights)

    def _all_in_fp8(self, weights: Iterable[ExpertWeights]) -> Iterator[ExpertWeights]:
        for index, one in enumerate(weights):
            if not stays_in_fp8(one, self._dtype):
                raise UnsupportedOptionError(
                    f"--moe-backend flashinfer: a layer's expert 0 is in FP8, expert {index} is not"
                )
            yield one

    def _make_own(
        self, weights: Iterable[ExpertWeights], count: int, activation: ExpertActivation
    ) -> RoutedExperts:
        experts = CpuExperts(
            self._plain(weights), count, activation, self._memory, self._scratch, self._threads
        )
        self._linears.count(experts.num_weights, own=True)
        return experts

    def _make_fused(
        self,
        first: ExpertWeights,
        weights: Iterable[ExpertWeights],
        count: int,
        activation: ExpertActivation,
    ) -> RoutedExperts:
        if stays_in_fp8(first, self._dtype):
            weights = self._all_in_fp8(weights)
        else:
            if isinstance(first.down, Fp8Weight) and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "experts are dequantized, which takes twice their memory: FlashInfer has "
                    "kernels for scales of blocks of whole 128 by 128 alone, on sm_90"
                )
            weights = self._plain(weights)
        return FlashInferExperts(
            weights, count, self._dtype, activation, self._flashinfer, self._workspace
        )


def _peek(weights: Iterable[ExpertWeights]) -> tuple[ExpertWeights, Iterator[ExpertWeights]]:
    """The first, and all of them."""
    rest = iter(weights)
    first = next(rest)
    return first, chain((first,), rest)
