"""Products and norms of ours inside of a transformers model, in place of its own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from kvrelay.model_runner.layers.elementwise import (
    Elementwise,
    NormWeight,
    TorchElementwise,
    rms_norm,
)
from kvrelay.model_runner.layers.linear import Linear, LinearFactory

_TOGETHER: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of products that models compute of the same inputs, one after the other."""


class OwnLinear(nn.Module):
    """A product of ours where a model has an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, product: Linear) -> None:
        super().__init__()
        self._product = product
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Some models ask for its dtype. The memory is the product's alone.
        self.weight = linear.weight.to("meta")
        self.bias = None if linear.bias is None else linear.bias.to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return _multiply(self._product, x, self.out_features)


def _multiply(product: Linear, x: torch.Tensor, outputs: int) -> torch.Tensor:
    shape = (*x.shape[:-1], outputs)
    if not x.numel():
        return x.new_empty(shape)
    return product(x.reshape(-1, x.shape[-1]).contiguous()).view(shape)


class JoinedProduct:
    """One product in place of several with the same inputs.

    The first that is called computes all; the others find theirs, if their inputs are the same
    tensor.
    """

    def __init__(self, product: Linear, sizes: Sequence[int]) -> None:
        self._product = product
        self._sizes = list(sizes)
        self._inputs: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The outputs of product `index`, ``[..., out]``, for ``x [..., in]``."""
        if x is not self._inputs:
            joined = _multiply(self._product, x, sum(self._sizes))
            self._inputs, self._outputs = x, torch.split(joined, self._sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._inputs, self._outputs = None, ()
        return output


class JoinedLinear(nn.Module):
    """A part of a `JoinedProduct` where a model has an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, joined: JoinedProduct, index: int) -> None:
        super().__init__()
        self._joined = joined
        self._index = index
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.to("meta")
        self.bias = None if linear.bias is None else linear.bias.to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return self._joined.part(x, self._index)


class OwnNorm(nn.Module):
    """A root mean square norm of ours where a model has one."""

    def __init__(self, elementwise: Elementwise, weight: NormWeight, eps: float) -> None:
        super().__init__()
        self._elementwise = elementwise
        self._weight = weight
        self._eps = eps

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the checkpoint has it."""
        return self._weight.stored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., N]`` to ``[..., N]``."""
        if not x.numel():
            return torch.empty_like(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._elementwise.rms_norm(rows, self._weight, self._eps).view(x.shape)


def install_parts(model: nn.Module, linears: LinearFactory, elementwise: Elementwise) -> None:
    """Replace the products and norms of a loaded model by ours.

    A norm is replaced if it computes what ours does. Each weight is dropped once it is replaced.
    """
    for parent in list(model.modules()):
        for names in _find_joined(parent):
            _join(parent, names, linears)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(
                    parent, name, OwnLinear(child, linears.make(child.weight.data, _bias(child)))
                )
            elif type(elementwise) is not TorchElementwise:
                norm = _own_norm(child, elementwise)
                if norm is not None:
                    setattr(parent, name, norm)


def _find_joined(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of a module's products that are one product of ours."""
    for names in _TOGETHER:
        parts = [getattr(parent, name, None) for name in names]
        linears = [part for part in parts if type(part) is nn.Linear]
        alike = {(one.in_features, one.bias is None, one.weight.dtype) for one in linears}
        if len(linears) == len(names) and len(alike) == 1:
            yield names


def _join(parent: nn.Module, names: Sequence[str], linears: LinearFactory) -> None:
    parts = [getattr(parent, name) for name in names]
    weight = torch.cat([one.weight.data for one in parts])
    biases = [bias for one in parts if (bias := _bias(one)) is not None]
    product = linears.make(weight, torch.cat(biases) if biases else None)
    joined = JoinedProduct(product, [one.out_features for one in parts])
    for index, (name, one) in enumerate(zip(names, parts, strict=True)):
        setattr(parent, name, JoinedLinear(one, joined, index))


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.data


def _own_norm(module: Any, elementwise: Elementwise) -> OwnNorm | None:
    """Our norm in place of a module, if it computes the same; None: it does not."""
    if "RMSNorm" not in type(module).__name__ or len(list(module.parameters())) != 1:
        return None
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    stored = getattr(module, "weight", None)
    if not isinstance(eps, float) or stored is None or stored.ndim != 1:
        return None
    stored = stored.data
    sample = torch.linspace(-3, 3, 2 * len(stored), device=stored.device).view(2, -1)
    sample = sample.to(stored.dtype)
    expected = module(sample)
    for add_unit_offset in (False, True):
        weight = NormWeight.of(stored, add_unit_offset)
        if torch.equal(rms_norm(sample, weight.factor, eps), expected):
            return OwnNorm(elementwise, weight, eps)
    return None
