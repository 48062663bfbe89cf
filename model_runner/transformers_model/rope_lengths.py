"""Rotary embeddings that follow the longest sequence of a step, held where they follow nothing.

transformers turns all tokens of a step by frequencies of its last position, if that lies beyond the
lengths that a model was pretrained with. A long neighbour would change a short sequence, and a
sequence's keys would no more fit its queries once it grows. Up to that length nothing changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, Final

_FOLLOWING: Final = ("dynamic", "longrope")
"""The kinds of rotary embeddings that follow the length, by transformers' `rope_type`."""


def steady_length(config: Any) -> int | None:
    """Find the length up to which every rotary embedding of a model is steady; None: any."""
    lengths = (
        _pretrained_length(config, rope)
        for rope in _ropes(config)
        if rope.get("rope_type", rope.get("type")) in _FOLLOWING
    )
    return min(lengths, default=None)


def hold_frequencies(model: Any) -> None:
    """Let no rotary embedding of a model look at positions to choose its frequencies."""
    if steady_length(model.config.get_text_config(decoder=True)) is None:
        return
    for module in model.modules():
        forward = type(module).forward
        if hasattr(module, "rope_type") and hasattr(forward, "__wrapped__"):
            module.forward = MethodType(_without_update(forward), module)


def _without_update(forward: Any) -> Any:
    """The forward below transformers' `dynamic_rope_update`, with what else wraps it."""
    inner = forward
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    assert inspect.isfunction(inner)
    return inner


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every section of a configuration that describes a rotary embedding."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sections = [one for one in parameters.values() if isinstance(one, Mapping)]
    yield from sections or [parameters]


def _pretrained_length(config: Any, rope: Mapping[str, Any]) -> int:
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "original_max_position_embeddings", None)
    return int(length or config.max_position_embeddings)
