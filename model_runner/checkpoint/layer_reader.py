"""The reader of each layer's part of config.json: window, rotation, experts."""

from __future__ import annotations

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.rope_reader import read_rope, read_rope_by_type
from kvrelay.model_runner.config.model_config import Architecture, LayerConfig, LayerType, MoEConfig

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


def read_moe(
    config: ConfigFile, architecture: Architecture, num_layers: int
) -> tuple[int, MoEConfig | None]:
    """The first layer with experts and their description; ``num_layers, None``: none has."""
    if architecture not in (Architecture.DEEPSEEK_V2, Architecture.DEEPSEEK_V3):
        return num_layers, None
    first = config.count("first_k_dense_replace")
    if first >= num_layers:
        return num_layers, None
    noaux_tc = architecture is Architecture.DEEPSEEK_V3
    _refuse_unknown_choice(config, noaux_tc)
    count, per_token = config.size("n_routed_experts"), config.size("num_experts_per_tok")
    groups, topk_group = _groups(config, noaux_tc)
    if count % groups:
        raise config.error("n_group", f"of {groups} does not divide {count} experts")
    if noaux_tc and count // groups < 2 and topk_group < groups:
        raise config.error("n_group", "leaves groups of one expert: not supported")
    if topk_group > groups:
        raise config.error("topk_group", f"of {topk_group} is more than {groups} groups")
    if per_token > count // groups * topk_group:
        raise config.error("num_experts_per_tok", f"of {per_token} is more than a token may choose")
    moe_intermediate_size = config.size("moe_intermediate_size")
    return first, MoEConfig(
        n_routed_experts=count,
        num_experts_per_tok=per_token,
        moe_intermediate_size=moe_intermediate_size,
        shared_intermediate_size=moe_intermediate_size * config.size("n_shared_experts"),
        n_group=groups,
        topk_group=topk_group,
        routed_scaling_factor=config.number("routed_scaling_factor"),
        norm_topk_prob=config.flag("norm_topk_prob", noaux_tc),
        noaux_tc=noaux_tc,
    )


def _groups(config: ConfigFile, noaux_tc: bool) -> tuple[int, int]:
    """`groups, topk_group`"""
    if not noaux_tc and config.text("topk_method", "greedy") == "greedy":
        return 1, 1
    return config.size("n_group"), config.size("topk_group")


def _refuse_unknown_choice(config: ConfigFile, noaux_tc: bool) -> None:
    method = config.text("topk_method", "noaux_tc" if noaux_tc else "greedy")
    if method not in (("noaux_tc",) if noaux_tc else ("greedy", "group_limited_greedy")):
        raise config.error("topk_method", f"of {method!r} is not supported in this architecture")
    expected = "sigmoid" if noaux_tc else "softmax"
    if config.text("scoring_func", expected) != expected:
        raise config.error("scoring_func", f"must be {expected!r} in this architecture")
    if not noaux_tc and config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "is true: not supported in this architecture")
    if config.size("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "other than 1 is not supported")
