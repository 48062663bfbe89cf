"""The reader of each layer's part of config.json: window, rotation, experts."""

from __future__ import annotations

from kvrelay.model_runner.checkpoint.architectures import DecoderOptions, WindowRule
from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.expert_reader import read_experts
from kvrelay.model_runner.checkpoint.rope_reader import read_rope, read_rope_by_type
from kvrelay.model_runner.config.model_config import LayerConfig, LayerType


def read_layers(
    config: ConfigFile, options: DecoderOptions, max_model_len: int
) -> tuple[LayerConfig, ...]:
    """Read one for each of `num_hidden_layers`.

    A window no shorter than `max_model_len` has no effect, and becomes full attention.
    """
    window = _window(config, options)
    types = _types(config, options, window)
    if window is None and LayerType.SLIDING in types:
        raise config.error("layer_types", "name sliding_attention, but there is no sliding_window")
    if options.has_ropes_by_type:
        ropes = read_rope_by_type(config, max_model_len)
    else:
        rope = read_rope(config, max_model_len, options.may_rotate_partially)
        ropes = dict.fromkeys(LayerType, rope)
    felt = window if window is not None and window < max_model_len else None
    windows = {LayerType.FULL: None, LayerType.SLIDING: felt}
    experts = read_experts(config, options.experts, len(types))
    return tuple(
        LayerConfig(ropes[kind], windows[kind], moe)
        for kind, moe in zip(types, experts, strict=True)
    )


def _window(config: ConfigFile, options: DecoderOptions) -> int | None:
    used = config.flag("use_sliding_window", False)
    if options.windows is WindowRule.LATE:
        if not used:
            return None
    elif used:
        raise config.not_native("use_sliding_window", "is true: not supported in this architecture")
    elif options.windows is WindowRule.NONE:
        return None
    return config.size_or_none("sliding_window", None)


def _types(config: ConfigFile, options: DecoderOptions, window: int | None) -> list[LayerType]:
    num_layers = config.size("num_hidden_layers")
    implied = _implied_types(config, options, window, num_layers)
    given = config.get("layer_types")
    if given is None:
        return implied
    if not isinstance(given, list) or len(given) != num_layers:
        raise config.error("layer_types", f"must name the type of {num_layers} layers")
    unknown = [kind for kind in given if kind not in list(LayerType)]
    if unknown:
        raise config.error("layer_types", f"of {unknown[0]!r} is not supported")
    if not options.windows.mixes and given != implied:
        raise config.error("layer_types", f"must all be {implied[0].value} in this architecture")
    return [LayerType(kind) for kind in given]


def _implied_types(
    config: ConfigFile, options: DecoderOptions, window: int | None, num_layers: int
) -> list[LayerType]:
    """The types of layers if config.json does not name them."""
    full, sliding = LayerType.FULL, LayerType.SLIDING
    match options.windows:
        case WindowRule.EVEN:
            return [full if i % 2 else sliding for i in range(num_layers)]
        case WindowRule.PATTERN:
            pattern = config.size("sliding_window_pattern")
            return [sliding if (i + 1) % pattern else full for i in range(num_layers)]
    if window is None:
        return [full] * num_layers
    late = options.windows is WindowRule.LATE
    first = config.count("max_window_layers") if late else 0
    return [sliding if i >= first else full for i in range(num_layers)]
