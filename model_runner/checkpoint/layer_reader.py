"""The reader of each layer's part of config.json: window, rotation, experts."""

from __future__ import annotations

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.moe_reader import read_moe
from kvrelay.model_runner.checkpoint.rope_reader import read_rope, read_rope_by_type
from kvrelay.model_runner.config.model_config import Architecture, LayerConfig, LayerType

_QWEN = (Architecture.QWEN2, Architecture.QWEN3)
_MIXED = (*_QWEN, Architecture.GEMMA2, Architecture.GEMMA3)
"""The architectures that may have layers of both types."""

# The values that transformers assumes for fields that a config.json leaves out.
_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28
_GEMMA3_PATTERN = 6


def read_layers(
    config: ConfigFile, architecture: Architecture, max_model_len: int
) -> tuple[LayerConfig, ...]:
    """Read one for each of `num_hidden_layers`.

    A window no shorter than `max_model_len` has no effect, and becomes full attention.
    """
    window = _window(config, architecture)
    types = _types(config, architecture, window)
    if window is None and LayerType.SLIDING in types:
        raise config.error("layer_types", "name sliding_attention, but there is no sliding_window")
    if architecture is Architecture.GEMMA3:
        ropes = read_rope_by_type(config, max_model_len)
    else:
        ropes = dict.fromkeys(LayerType, read_rope(config, max_model_len))
    felt = window if window is not None and window < max_model_len else None
    windows = {LayerType.FULL: None, LayerType.SLIDING: felt}
    first, moe = read_moe(config, architecture, len(types))
    return tuple(
        LayerConfig(ropes[kind], windows[kind], moe if index >= first else None)
        for index, kind in enumerate(types)
    )


def _window(config: ConfigFile, architecture: Architecture) -> int | None:
    if architecture in _QWEN:
        if not config.flag("use_sliding_window", False):
            return None
    elif config.flag("use_sliding_window", False):
        raise config.error("use_sliding_window", "is true: not supported in this architecture")
    elif architecture not in (*_MIXED, Architecture.MISTRAL):
        return None
    return config.size_or_none("sliding_window", _WINDOW)


def _types(config: ConfigFile, architecture: Architecture, window: int | None) -> list[LayerType]:
    num_layers = config.size("num_hidden_layers")
    implied = _implied_types(config, architecture, window, num_layers)
    given = config.get("layer_types")
    if given is None:
        return implied
    if not isinstance(given, list) or len(given) != num_layers:
        raise config.error("layer_types", f"must name the type of {num_layers} layers")
    unknown = [kind for kind in given if kind not in list(LayerType)]
    if unknown:
        raise config.error("layer_types", f"of {unknown[0]!r} is not supported")
    if architecture not in _MIXED and given != implied:
        raise config.error("layer_types", f"must all be {implied[0].value} in this architecture")
    return [LayerType(kind) for kind in given]


def _implied_types(
    config: ConfigFile, architecture: Architecture, window: int | None, num_layers: int
) -> list[LayerType]:
    """The types of layers if config.json does not name them."""
    full, sliding = LayerType.FULL, LayerType.SLIDING
    if architecture is Architecture.GEMMA2:
        return [full if i % 2 else sliding for i in range(num_layers)]
    if architecture is Architecture.GEMMA3:
        pattern = config.size("sliding_window_pattern", _GEMMA3_PATTERN)
        return [sliding if (i + 1) % pattern else full for i in range(num_layers)]
    if window is None:
        return [full] * num_layers
    first = config.count("max_window_layers", _MAX_WINDOW_LAYERS) if architecture in _QWEN else 0
    return [sliding if i >= first else full for i in range(num_layers)]
