"""The reader of config.json's mixtures of experts: which layers they are, how tokens choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.model_runner.checkpoint.architectures import ExpertOptions, has
from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.model_config import ExpertScores, MoEConfig
from kvrelay.model_runner.config.moe_backend import ClampedSilu

_DENSE, _SPARSE = "dense", "sparse"


def read_experts(
    config: ConfigFile, options: ExpertOptions | None, num_layers: int
) -> list[MoEConfig | None]:
    """Read the experts of each layer; None: the layer has one gated product."""
    if options is None:
        return [None] * num_layers
    sparse = _sparse_layers(config, options, num_layers)
    if not any(sparse):
        return [None] * num_layers
    moe = _read_moe(config, options)
    return [moe if is_sparse else None for is_sparse in sparse]


def _sparse_layers(config: ConfigFile, options: ExpertOptions, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    if config.size("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "other than 1 is not supported")
    sparse = [True] * num_layers
    for field in options.layer_fields:
        sparse = _both(sparse, _LAYER_FIELDS[field](config, num_layers))
    for field in _LAYER_FIELDS.keys() - options.layer_fields:
        if config.has(field) and _both(sparse, _LAYER_FIELDS[field](config, num_layers)) != sparse:
            raise config.error(field, "leaves layers without experts: not in this architecture")
    return sparse


def _both(these: list[bool], those: list[bool]) -> list[bool]:
    return [one and other for one, other in zip(these, those, strict=True)]


def _after_first(config: ConfigFile, num_layers: int) -> list[bool]:
    first = config.count("first_k_dense_replace")
    return [index >= first for index in range(num_layers)]


def _by_type(config: ConfigFile, num_layers: int) -> list[bool]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return [index > 0 for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("mlp_layer_types", f"must name the type of {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (_DENSE, _SPARSE)]:
        raise config.error("mlp_layer_types", f"of {unknown[0]!r} is not supported")
    return [kind == _SPARSE for kind in kinds]


def _at_steps(config: ConfigFile, num_layers: int) -> list[bool]:
    step = config.size("decoder_sparse_step", 1)
    return [(index + 1) % step == 0 for index in range(num_layers)]


def _but_some(config: ConfigFile, num_layers: int) -> list[bool]:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", f"must be a list, got {dense!r}")
    return [index not in dense for index in range(num_layers)]


_LAYER_FIELDS: Final[Mapping[str, Callable[[ConfigFile, int], list[bool]]]] = {
    "first_k_dense_replace": _after_first,
    "mlp_layer_types": _by_type,
    "decoder_sparse_step": _at_steps,
    "mlp_only_layers": _but_some,
}
"""The readers of `ExpertOptions.layer_fields`."""


def _read_moe(config: ConfigFile, options: ExpertOptions) -> MoEConfig:
    count_field = next(filter(config.has, options.count_fields), options.count_fields[0])
    count, per_token = config.size(count_field), config.size("num_experts_per_tok")
    groups, topk_group = _groups(config, options)
    if count % groups:
        raise config.error("n_group", f"of {groups} does not divide {count} experts")
    by_sigmoid = options.scores is ExpertScores.SIGMOID
    if by_sigmoid and count // groups < 2 and topk_group < groups:
        raise config.error("n_group", "leaves groups of one expert: not supported")
    if topk_group > groups:
        raise config.error("topk_group", f"of {topk_group} is more than {groups} groups")
    if per_token > count // groups * topk_group:
        raise config.error("num_experts_per_tok", f"of {per_token} is more than a token may choose")
    inner_size = config.size(options.inner_size_field)
    return MoEConfig(
        n_routed_experts=count,
        num_experts_per_tok=per_token,
        moe_intermediate_size=inner_size,
        shared_intermediate_size=_shared_size(config, options, inner_size),
        n_group=groups,
        topk_group=topk_group,
        routed_scaling_factor=config.number("routed_scaling_factor") if options.has_groups else 1.0,
        norm_topk_prob=_normalizes(config, options),
        scores=options.scores,
        tensors=options.tensors,
        clamped=_read_clamp(config) if options.clamps else None,
    )


def _shared_size(config: ConfigFile, options: ExpertOptions, inner_size: int) -> int:
    if options.shared_size_field is not None:
        return config.size(options.shared_size_field)
    return inner_size * config.size("n_shared_experts") if options.has_shared else 0


def _read_clamp(config: ConfigFile) -> ClampedSilu:
    assumed = ClampedSilu()
    return ClampedSilu(
        config.number("swiglu_alpha", assumed.slope), config.number("swiglu_limit", assumed.most)
    )


def _groups(config: ConfigFile, options: ExpertOptions) -> tuple[int, int]:
    """`groups, topk_group`"""
    method = config.text("topk_method", options.methods[0])
    if method not in options.methods:
        raise config.error("topk_method", f"of {method!r} is not supported in this architecture")
    expected = "sigmoid" if options.scores is ExpertScores.SIGMOID else "softmax"
    if config.text("scoring_func", expected) != expected:
        raise config.error("scoring_func", f"must be {expected!r} in this architecture")
    if not options.has_groups:
        for field in ("n_group", "topk_group", "routed_scaling_factor"):
            if config.number(field, 1.0) != 1:
                raise config.error(field, "other than 1 is not supported in this architecture")
    if method == "greedy" or not options.has_groups:
        return 1, 1
    return config.size("n_group"), config.size("topk_group")


def _normalizes(config: ConfigFile, options: ExpertOptions) -> bool:
    if options.normalizes is False and config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "is true: not supported in this architecture")
    return has(options.normalizes, config)
