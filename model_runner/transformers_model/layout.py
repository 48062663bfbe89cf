"""The pools of a model, found by its own forward: what it attends to, and what it stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvrelay.model_runner.config.pool_layers import PoolLayers
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.transformers_model.attention_interface import (
    NAME,
    CacheOfForward,
    Scoring,
    running,
    use_attention,
)
from kvrelay.model_runner.transformers_model.described_mask import (
    DescribedMask,
    Unbounded,
    find_window,
)
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError

_PROBED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention in a forward; all forwards have the same ones, in the same order."""

    heads: QueryHeads
    """The query heads; with keys and values of unlike width both are as wide as the wider."""
    num_kv_heads: int
    key_dim: int
    value_dim: int
    in_kernels: bool
    """Whether kernels of paged attention compute it: it is causal, perhaps with a window."""
    window: int | None
    """The number of last tokens that a token sees, as far as that is all there is to know."""
    pool: int = 0
    """The pool of its keys and values; of models with latents it does not count."""
    place: int = 0
    """The layer in that pool."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The calls of a forward, and the pools that they need."""

    calls: tuple[AttentionCall, ...]
    latents: tuple[int, ...]
    """The width of each latent that layers store, without its rotary key; empty: there are none."""
    pools: tuple[PoolLayers, ...]

    @classmethod
    def of(cls, calls: Sequence[AttentionCall], latents: Sequence[tuple[int, int]]) -> Layout:
        """Lay out the pools for these calls, or for these latents and rotary keys."""
        if latents:
            widths = set(map(sum, latents))
            if len(widths) > 1:
                raise ModelCodeError(f"its latents have several widths: {sorted(widths)}")
            pool = PoolLayers(len(latents), 1, widths.pop(), latent=True)
            return cls(tuple(calls), tuple(latent for latent, _ in latents), (pool,))
        kinds = [_pool_of(call) for call in calls]
        counts = Counter(kinds)
        order = sorted(counts, key=lambda one: (one.window or 0, one.num_kv_heads, one.head_dim))
        pools = tuple(replace(kind, num_layers=counts[kind]) for kind in order)
        taken: Counter[int] = Counter()
        placed = []
        for call, kind in zip(calls, kinds, strict=True):
            pool_index = order.index(kind)
            placed.append(replace(call, pool=pool_index, place=taken[pool_index]))
            taken[pool_index] += 1
        return cls(tuple(placed), (), pools)


def _pool_of(call: AttentionCall) -> PoolLayers:
    """The kind of pool that a call needs, its layers not counted."""
    return PoolLayers(0, call.num_kv_heads, call.heads.value_dim, window=call.window)


class _Probe:
    """A `Forward` that computes nothing and records the shapes of what it is given."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.calls: list[AttentionCall] = []
        self.stored: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.attended: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.stored.append((tuple(first.shape), tuple(second.shape)))
        return first, second

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: DescribedMask | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        if query.shape[2] != _PROBED_TOKENS or key.shape[2] != _PROBED_TOKENS:
            raise ModelCodeError("it attends to keys that are not those of the queries' tokens")
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads or value.shape[1] != kv_heads:
            raise ModelCodeError(f"{kv_heads} heads of keys do not divide {heads} of queries")
        window = scoring.window if mask is None else self._find_window(mask)
        if isinstance(window, int) and window >= self._longest:
            window = None
        wider = max(key.shape[3], value.shape[3])
        self.attended.append((tuple(key.shape), tuple(value.shape)))
        self.calls.append(
            AttentionCall(
                QueryHeads(heads, wider, scoring.scale, scoring.softcap),
                kv_heads,
                key.shape[3],
                value.shape[3],
                window is not Unbounded.ASK,
                None if isinstance(window, Unbounded) else window,
            )
        )
        return query.new_empty(1, query.shape[2], heads, value.shape[3])

    def _find_window(self, mask: DescribedMask) -> int | Unbounded | None:
        try:
            return find_window(mask, self._longest)
        except (NotImplementedError, RuntimeError):  # it reads tensors, which have no contents here
            return Unbounded.ASK


class _NothingChosen(TorchFunctionMode):
    """Let code that looks for places on the meta device find none: no token goes to any expert."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.nonzero, torch.Tensor.nonzero, torch.where) and len(args) == 1:
            places: torch.Tensor = args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
            as_columns = func is torch.where or (kwargs or {}).get("as_tuple", False)
            return places.unbind(1) if as_columns else places
        if func is torch.Tensor.__contains__:
            return False
        if func is torch.Tensor.tolist and args[0].is_meta:
            return [0] * len(args[0])
        if func is torch.Tensor.split and isinstance(args[1], list) and not any(args[1]):
            return (args[0], *[args[0][:0]] * (len(args[1]) - 1))  # by counts from above
        return func(*args, **(kwargs or {}))


def find_layout(model: Any, longest: int) -> Layout:
    """Find the layout of a model on the meta device, for sequences of up to `longest` tokens.

    Raises:
        ModelCodeError: its forwards cannot be laid out in pages.
    """
    use_attention(model, NAME)
    probe = _Probe(longest)
    tokens = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64, device="meta")
    with running(probe), _NothingChosen(), torch.inference_mode():
        model(
            input_ids=tokens,
            position_ids=torch.arange(_PROBED_TOKENS, device="meta")[None],
            past_key_values=CacheOfForward(),
            use_cache=False,
        )
    if not probe.calls:
        raise ModelCodeError("it has attention code of its own")
    return Layout.of(probe.calls, _find_latents(probe))


def _find_latents(probe: _Probe) -> list[tuple[int, int]]:
    """The latents and rotary keys that are stored in place of keys and values; maybe none."""
    is_latent = [
        first[1] == second[1] == 1 and (first, second) not in probe.attended
        for first, second in probe.stored
    ]
    if not any(is_latent):
        return []
    if not all(is_latent) or len(probe.stored) != len(probe.calls):
        raise ModelCodeError("only some of its layers store latents")
    return [(first[3], second[3]) for first, second in probe.stored]
