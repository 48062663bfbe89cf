"""The reader of config.json's rotary embedding: how positions turn into angles."""

from __future__ import annotations

import math

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.model_config import LayerType
from kvrelay.model_runner.config.rope import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope


def read_rope(config: ConfigFile, max_model_len: int, may_be_partial: bool = False) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before).

    Raise `NotNativeError` for a kind that is not computed exactly here (``dynamic`` and
    ``longrope`` depend on the length of the running batch).
    """
    rope = _section(config)
    if not may_be_partial:
        _refuse_partial(config)
        _refuse_partial(rope)
    for kind in LayerType:
        if rope.has(kind):
            raise rope.error(kind, "is not supported in this architecture: its layers rotate alike")
    pretrained = config if config.has("original_max_position_embeddings") else rope
    return _parse(
        rope,
        rope.number("rope_theta", config.number("rope_theta")),
        pretrained.size("original_max_position_embeddings", max_model_len),
        max_model_len,
    )


def read_partial_factor(config: ConfigFile, default: float) -> float:
    """Read the part of a head that rotates."""
    factor = config.number("partial_rotary_factor", default)
    return _section(config).number("partial_rotary_factor", factor)


def read_rope_by_type(config: ConfigFile, max_model_len: int) -> dict[LayerType, Rope]:
    """Read the ropes of Gemma 3, whose layers with a window rotate faster.

    Before transformers 5 these had `rope_local_base_freq`; `rope_theta` and `rope_scaling` were for
    the other layers alone.
    """
    _refuse_partial(config)
    nested = config.section("rope_parameters")
    if config.has("rope_parameters"):
        if config.has("rope_scaling"):
            raise config.error("rope_scaling", "beside rope_parameters is not supported")
        for field in ("rope_type", "rope_theta"):
            if nested.has(field):
                raise nested.error(field, "must be in full_attention and sliding_attention")
        sections = {kind: nested.section(kind) for kind in LayerType}
    else:
        sections = {LayerType.FULL: config.section("rope_scaling"), LayerType.SLIDING: nested}
    for section in sections.values():
        _refuse_partial(section)
    thetas = {
        LayerType.FULL: config.number("rope_theta"),
        LayerType.SLIDING: config.number("rope_local_base_freq"),
    }
    return {
        kind: _parse(
            rope,
            rope.number("rope_theta", thetas[kind]),
            rope.size("original_max_position_embeddings", max_model_len),
            max_model_len,
        )
        for kind, rope in sections.items()
    }


def read_latent_scale(config: ConfigFile) -> float:
    """Read the factor of latent attention's scores for a stretched rotation: DeepSeek's yarn.

    Only a part of a head rotates, so cosines and sines alone cannot carry it.
    """
    rope = _section(config)
    if _kind(rope) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _mscale(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _section(config: ConfigFile) -> ConfigFile:
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if (
        new
        and old
        and any(
            new.get("rope_type" if name == "type" else name) != value for name, value in old.items()
        )
    ):
        raise config.error("rope_scaling", "beside other rope_parameters is not supported")
    return config.section("rope_parameters" if new else "rope_scaling")


def _refuse_partial(owner: ConfigFile) -> None:
    if owner.number("partial_rotary_factor", 1.0) != 1.0:
        raise owner.error("partial_rotary_factor", "other than 1 is not supported")


def _kind(rope: ConfigFile) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    # A text token has one position in all of mrope's three dimensions.
    return "default" if kind == "mrope" else kind


def _parse(
    rope: ConfigFile, theta: float, original_max_position_embeddings: int, max_model_len: int
) -> Rope:
    kind = _kind(rope)
    if kind == "default":
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, rope.number("factor"))
    if kind == "llama3":
        return _parse_llama3(rope, theta, original_max_position_embeddings)
    if kind == "yarn":
        return _parse_yarn(rope, theta, original_max_position_embeddings, max_model_len)
    problem = f"{kind!r} is not supported (default, linear, llama3, yarn are)"
    raise rope.not_native("rope_type", problem)


def _parse_llama3(
    rope: ConfigFile, theta: float, original_max_position_embeddings: int
) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", "must be greater than low_freq_factor")
    return Llama3Rope(theta, rope.number("factor"), low, high, original_max_position_embeddings)


def _parse_yarn(
    rope: ConfigFile, theta: float, original_max_position_embeddings: int, max_model_len: int
) -> YarnRope:
    factor = rope.number("factor", max_model_len / original_max_position_embeddings)
    inferred = _mscale(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = _mscale(factor, rope.number("mscale"))
        inferred = numerator / _mscale(factor, rope.number("mscale_all_dim"))
    return YarnRope(
        theta=theta,
        factor=factor,
        attention_factor=rope.number("attention_factor", inferred),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        original_max_position_embeddings=original_max_position_embeddings,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
