"""The ends of transformers' interfaces: its models call these for attention, masks and caches.

A model's forward runs inside `running`; what it calls goes to the `Forward` given there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import nn

from kvrelay.model_runner.transformers_model.described_mask import DescribedMask
from kvrelay.model_runner.transformers_model.refusals import FARTHEST, ModelCodeError

NAME: Final = "kvrelay"
"""The name of our attention among transformers' implementations."""

_HARMLESS: Final = frozenset(
    {
        "cache_params",
        "cache_position",
        "conv_mask",
        "deterministic",
        "dropout",
        "hidden_states",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "padding_mask",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "target_dtype",
        "use_cache",
    }
)
"""Arguments of attention that change nothing: some models hand on whatever they were given."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one call of attention makes weights of queries and keys."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    """``[heads]``: scores of a token that has no value."""
    window: int | None
    """The window that the call names; its mask, if it has one, knows it too."""


class Forward(Protocol):
    """One forward of a model: what its attention and its cache do."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: DescribedMask | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend with ``query [1, heads, T, D]``: ``[1, T, heads, value_dim]``, contiguous."""
        ...

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take what a layer gives its cache, ``[1, heads, T, dim]``; return what it goes on with.

        It is keys and values as they are, or latents and rotary keys of all contexts.
        """
        ...


_forward: ContextVar[Forward] = ContextVar("forward")


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Let `forward` compute the attention of the model that runs inside."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


@cache
def register() -> None:
    """Make our attention known to transformers, once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _describe_mask)


def _describe_mask(*, mask_function: Any, **_: Any) -> DescribedMask:
    return DescribedMask(mask_function)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DescribedMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function."""
    unknown = sorted({name for name, given in others.items() if given is not None} - _HARMLESS)
    if unknown:
        raise ModelCodeError(f"its attention has an unknown argument {unknown[0]}")
    if attention_mask is not None and not isinstance(attention_mask, DescribedMask):
        raise ModelCodeError("it makes masks of its own")
    if query.shape[0] != 1:
        raise ModelCodeError(f"its queries have the shape {tuple(query.shape)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, softcap, s_aux, sliding_window)
    attended = _forward.get().attend(module, query, key, value, attention_mask, scoring)
    return attended, None


class NoLayers(tuple[Any, ...]):
    """The layers of a cache that has none: models ask them for what pages do not hold."""

    __slots__ = ()

    def __getitem__(self, _: object) -> NoReturn:
        raise ModelCodeError("it stores more than keys and values, or in a form of its own")


class CacheOfForward:
    """The cache that a model is given: it is empty, and hands what is stored to the forward.

    Positions come with the batch. A cache must be there, else transformers takes positions that
    begin again for packed sequences.
    """

    is_compileable = False
    is_initialized = False
    is_sliding = ()
    is_linear = ()
    is_dummy = ()
    layers = NoLayers()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """No token is there before the batch's."""
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No token is there before the batch's."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The length of contexts, and where they begin."""
        return FARTHEST, 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand what a layer stores to the forward."""
        return _forward.get().update(keys, values, layer_idx)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """No state is there."""
        return False

    def update_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a state."""
        raise ModelCodeError("it keeps a state")

    update_recurrent_state = get_linear_cache = update_conv_state


def use_attention(model: Any, name: str) -> None:
    """Let all of a model's attention be computed by the implementation `name`."""
    register()
    for config in _configs(model):
        config._attn_implementation = name


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let transformers' own code compute all of a model's attention inside."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    use_attention(model, "eager")
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _configs(model: Any) -> list[Any]:
    """The configurations that a model's modules read: there may be several."""
    found = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    return list(found.values())
