"""Reads what config.json says of experts."""

from __future__ import annotations

from kvrelay.model_runner.config_file import ConfigFile
from kvrelay.model_runner.model_config import Architecture, ExpertsConfig


def read_experts(
    config: ConfigFile, architecture: Architecture, num_layers: int
) -> tuple[int, ExpertsConfig | None]:
    """The first layer with experts and what they are; ``num_layers, None`` if there are none."""
    if architecture not in (Architecture.DEEPSEEK_V2, Architecture.DEEPSEEK_V3):
        return num_layers, None
    first = config.count("first_k_dense_replace")
    if first >= num_layers:
        return num_layers, None
    balanced = architecture is Architecture.DEEPSEEK_V3
    _refuse_unknown_choice(config, balanced)
    count, per_token = config.size("n_routed_experts"), config.size("num_experts_per_tok")
    groups, best_groups = _groups(config, balanced)
    if count % groups:
        raise config.error("n_group", f"of {groups} does not divide {count} experts")
    if balanced and count // groups < 2 and best_groups < groups:
        raise config.error("n_group", "leaves groups of one expert: not supported")
    if best_groups > groups:
        raise config.error("topk_group", f"of {best_groups} is more than {groups} groups")
    if per_token > count // groups * best_groups:
        raise config.error("num_experts_per_tok", f"of {per_token} is more than a token may choose")
    inner_size = config.size("moe_intermediate_size")
    return first, ExpertsConfig(
        count=count,
        per_token=per_token,
        inner_size=inner_size,
        shared_size=inner_size * config.size("n_shared_experts"),
        groups=groups,
        best_groups=best_groups,
        scaling=config.number("routed_scaling_factor"),
        normalized=config.flag("norm_topk_prob", balanced),
        balanced=balanced,
    )


def _groups(config: ConfigFile, balanced: bool) -> tuple[int, int]:
    """`groups, best_groups`"""
    if not balanced and config.text("topk_method", "greedy") == "greedy":
        return 1, 1
    return config.size("n_group"), config.size("topk_group")


def _refuse_unknown_choice(config: ConfigFile, balanced: bool) -> None:
    method = config.text("topk_method", "noaux_tc" if balanced else "greedy")
    if method not in (("noaux_tc",) if balanced else ("greedy", "group_limited_greedy")):
        raise config.error("topk_method", f"of {method!r} is not supported in this architecture")
    expected = "sigmoid" if balanced else "softmax"
    if config.text("scoring_func", expected) != expected:
        raise config.error("scoring_func", f"must be {expected!r} in this architecture")
    if not balanced and config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "is true: not supported in this architecture")
    if config.size("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "other than 1 is not supported")
