"""The reader of config.json's description of experts."""

from __future__ import annotations

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.model_config import Architecture, MoEConfig


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
