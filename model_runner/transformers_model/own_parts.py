"""Products and norms of ours inside of a transformers model, in place of its own modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.layers.elementwise import (
    Elementwise,
    NormWeight,
    TorchElementwise,
    rms_norm,
)
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights, RoutedExperts
from kvrelay.model_runner.layers.linear import Linear, LinearFactory

_GATED: Final = ("gate_proj", "up_proj")
_TOGETHER: Final = (("q_proj", "k_proj", "v_proj"), _GATED)
"""The names of products that models compute of the same inputs, one after the other."""
_FARTHEST: Final = 100.0
"""The size of gates and ups to which activations are compared: some models clamp them."""


class WatchedLinear(nn.Linear):
    """An `nn.Linear` that notes whether others read its weight: then it must stay as it is."""

    is_read = False

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight, for code that is not this product's."""
        self.is_read = True
        return self.own_weight

    @property
    def own_weight(self) -> torch.Tensor:
        """The weight, for the product itself."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return functional.linear(x, self.own_weight, self.bias)


def watch_products(model: nn.Module) -> None:
    """Let the products of a model note who reads their weights, before its own forward runs."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WatchedLinear


class OwnLinear(nn.Module):
    """A product of ours where a model has an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, product: Linear) -> None:
        super().__init__()
        self._product = product
        self.in_features, self.out_features = linear.in_features, linear.out_features

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return self._joined.part(x, self._index)


class OwnGatedProduct(nn.Module):
    """A gated feed-forward of ours in place of a model's."""

    def __init__(
        self, gate_up: Linear, down: Linear, activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down
        self._activate = activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``down(activation(gate(x)) * up(x))``, ``[..., hidden_size]`` both."""
        if not x.numel():
            return torch.empty_like(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._down(self._activate(self._gate_up(rows))).view(x.shape)


class OwnExperts(nn.Module):
    """Routed experts of ours in place of a model's."""

    def __init__(self, experts: RoutedExperts, count: int) -> None:
        super().__init__()
        self._experts = experts
        self.num_experts = count

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]``: the sum of each token's experts, by their ``shares [T, each]``."""
        if not x.numel():
            return torch.empty_like(x)
        return self._experts(x.contiguous(), chosen, shares.to(torch.float32))


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


@dataclass(frozen=True, slots=True)
class OwnParts:
    """The makers of the parts of ours."""

    linears: LinearFactory
    elementwise: Elementwise
    experts: ExpertFactory


def install_parts(model: nn.Module, parts: OwnParts) -> None:
    """Replace products, norms, gated feed-forwards and experts of a loaded model by ours.

    Its products were watched while its own forward ran. Norms, feed-forwards and experts are
    replaced if they compute what ours do. Each weight is dropped once it is replaced.
    """
    linears, elementwise = parts.linears, parts.elementwise
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            own: nn.Module | None = _own_gated_product(child, linears, elementwise)
            if own is None:
                own = _own_experts(child, parts.experts)
            if own is None and type(elementwise) is not TorchElementwise:
                own = _own_norm(child, elementwise)
            if own is not None:
                setattr(parent, name, own)
    for parent in list(model.modules()):
        for names in _find_joined(parent):
            _join(parent, names, linears)
        for name, child in list(parent.named_children()):
            if isinstance(child, WatchedLinear) and not child.is_read:
                setattr(parent, name, OwnLinear(child, _make(linears, child)))


def _own_experts(module: Any, factory: ExpertFactory) -> OwnExperts | None:
    """Our experts in place of a module's, if its weights and gates are as ours; None: they are not.

    transformers' experts say of themselves how their weights lie.
    """
    if not hasattr(module, "is_concatenated"):
        return None
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    is_ours = module.has_gate and module.is_concatenated and not module.is_transposed
    is_more = module.has_bias or module.has_post_expert_norm
    activation = _find_activation(module)
    if not is_ours or is_more or activation is None:
        return None
    if getattr(module, "num_experts", None) != len(gate_up):  # it may send tokens to none
        return None
    each = (ExpertWeights(one, other) for one, other in zip(gate_up, down, strict=True))
    return OwnExperts(factory.make(each, len(gate_up), activation), len(gate_up))


def _find_activation(module: Any) -> Activation | None:
    """The activation of a module's gates, found by what it makes of numbers; None: another."""
    gates = torch.cat((torch.linspace(-4, 4, 33), torch.linspace(-_FARTHEST, _FARTHEST, 401)))
    ups = torch.tensor([-_FARTHEST, -7.5, -0.5, 0.5, 7.5, _FARTHEST])
    pairs = (gates.expand(len(ups), -1), ups[:, None].expand(-1, len(gates)))
    sample = torch.cat(pairs, dim=-1)
    gate, up = sample.chunk(2, dim=-1)
    try:
        expected = module._apply_gate(sample)
    except (AttributeError, RuntimeError, TypeError):  # of other weights than these
        return None
    ways = {
        Activation.SILU: functional.silu(gate) * up,
        Activation.GELU_TANH: functional.gelu(gate, approximate="tanh") * up,
    }
    return next((one for one, made in ways.items() if torch.equal(made, expected)), None)


def _make(linears: LinearFactory, *parts: WatchedLinear) -> Linear:
    """Make one product of several with the same inputs."""
    weights = [one.own_weight.data for one in parts]
    biases = [one.bias.data for one in parts if one.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return linears.make(weight, torch.cat(biases) if biases else None)


def _own_gated_product(
    module: Any, linears: LinearFactory, elementwise: Elementwise
) -> OwnGatedProduct | None:
    """Our feed-forward in place of a module, if it computes the same; None: it does not."""
    parts = [getattr(module, name, None) for name in (*_GATED, "down_proj")]
    known = [one for one in parts if isinstance(one, WatchedLinear) and not one.is_read]
    takes_one = len(inspect.signature(module.forward).parameters) == 1
    if len(known) != len(parts) or not _are_alike(known[:2]) or not takes_one:
        return None
    gate, up, down = known
    sample = _sample_of_gates(gate, up)
    expected = module(sample)
    ways = (
        (functional.silu, elementwise.silu_mul),
        (partial(functional.gelu, approximate="tanh"), elementwise.gelu_mul),
    )
    for activation, activate in ways:
        if torch.equal(down(activation(gate(sample)) * up(sample)), expected):
            return OwnGatedProduct(_make(linears, gate, up), _make(linears, down), activate)
    return None


def _sample_of_gates(gate: WatchedLinear, up: WatchedLinear) -> torch.Tensor:
    """Inputs ``[1, S, in]`` that make gates and ups near zero and far from it, of both signs."""
    weight = gate.own_weight
    rows = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device).to(weight.dtype)
    rows = torch.cat((rows, -rows)).view(1, 4, -1)
    nearest = torch.stack([one(rows).abs().amax() for one in (gate, up)]).amin()
    return torch.cat((rows, rows * (_FARTHEST / nearest)), dim=1)


def _find_joined(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of a module's products that are one product of ours."""
    for names in _TOGETHER:
        parts = [getattr(parent, name, None) for name in names]
        linears = [one for one in parts if isinstance(one, WatchedLinear) and not one.is_read]
        if len(linears) == len(names) and _are_alike(linears):
            yield names


def _are_alike(linears: Sequence[WatchedLinear]) -> bool:
    """Whether one product can have the outputs of several."""
    return len({(one.in_features, one.bias is None, one.own_weight.dtype) for one in linears}) == 1


def _join(parent: nn.Module, names: Sequence[str], linears: LinearFactory) -> None:
    parts = [getattr(parent, name) for name in names]
    joined = JoinedProduct(_make(linears, *parts), [one.out_features for one in parts])
    for index, (name, one) in enumerate(zip(names, parts, strict=True)):
        setattr(parent, name, JoinedLinear(one, joined, index))


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
