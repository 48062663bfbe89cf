"""The table of architectures: each is a set of options of the one `Decoder`.

docs/adding-a-model.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.config.model_config import (
    DEEPSEEK_NAMES,
    Activation,
    ExpertScores,
    ExpertTensors,
    QKNorm,
)


@dataclass(frozen=True, slots=True)
class ByConfig:
    """A flag that config.json sets."""

    field: str
    default: bool = False


Flag: TypeAlias = bool | ByConfig
"""A property that an architecture has or lacks, or has if config.json says so."""


class WindowRule(StrEnum):
    """The layers that have a sliding window unless `layer_types` names them."""

    NONE = "none"
    ALL = "all"
    LATE = "late"
    """The layers from `max_window_layers` on, if `use_sliding_window`."""
    EVEN = "even"
    """The first of every two layers."""
    PATTERN = "pattern"
    """All but the last of every `sliding_window_pattern` layers."""

    @property
    def mixes(self) -> bool:
        """Whether `layer_types` may name both kinds of layers."""
        return self not in (WindowRule.NONE, WindowRule.ALL)


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """The options of layers that are mixtures of experts."""

    scores: ExpertScores
    count_fields: tuple[str, ...] = ("n_routed_experts",)
    """The fields of the number of experts: the first that config.json has."""
    inner_size_field: str = "moe_intermediate_size"
    layer_fields: tuple[str, ...] = ()
    """The fields that say which layers have experts; without one all have."""
    has_shared: bool = False
    """Whether there are shared experts: `n_shared_experts`."""
    shared_size_field: str | None = None
    """The field of the inner size of one shared expert; None: `has_shared` tells."""
    has_groups: bool = False
    """Whether a choice may be by groups, and results are scaled: `routed_scaling_factor`."""
    methods: tuple[str, ...] = ("greedy",)
    """The values of `topk_method` that are computed, the assumed one first."""
    normalizes: Flag = False
    """Whether weights are divided by their sum."""
    clamps: bool = False
    """Whether the activation is `ClampedSilu`."""
    tensors: ExpertTensors = DEEPSEEK_NAMES


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The properties of a decoder that its architecture fixes."""

    model_types: tuple[str, ...] = ()
    """The values of `model_type` that mean this architecture where `architectures` is null."""
    is_latent: bool = False
    """Latent attention (MLA)."""
    interleaves_rope: Flag = True
    """Whether neighbouring dimensions of latent attention turn together in the checkpoint."""
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: QKNorm = QKNorm.NONE
    has_qk_norm: Flag = True
    """Whether there are the norms of `qk_norm`."""
    has_sinks: bool = False
    has_multipliers: bool = False
    """Scores, embeddings, results and logits have factors in config.json (Granite)."""
    has_query_scalar: bool = False
    """Scores are scaled by `query_pre_attn_scalar`, not by `head_dim`."""
    may_rotate_partially: bool = False
    """`partial_rotary_factor`, or `rotary_dim`, may leave dimensions of a head as they are."""
    has_ropes_by_type: bool = False
    """Layers with a window rotate by another rope."""
    windows: WindowRule = WindowRule.NONE
    activation_field: str = "hidden_act"
    activation: Activation = Activation.SILU
    has_pre_norms: bool = True
    """The inputs of attention and feed-forward are normalized."""
    has_post_norms: bool = False
    """The results of attention and feed-forward are normalized too."""
    adds_unit_offset: bool = False
    """Norm weights are stored less one."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the root of their size."""
    experts: ExpertOptions | None = None
    rope_scaling: Mapping[str, Any] | None = None
    """The rope that transformers assumes where config.json has none."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that transformers assumes where config.json leaves them out."""

    def complete(self, config: ConfigFile) -> ConfigFile:
        """The same file with what transformers assumes where it leaves fields out."""
        if self.rope_scaling is not None and config.get("rope_parameters") is None:
            rope = config.get("rope_scaling") or self.rope_scaling
            config = config.with_fields({"rope_scaling": rope})
        return config.with_defaults({"rope_theta": 10_000.0, **self.defaults})


_BIAS = ByConfig("attention_bias")
_DEEPSEEK_EXPERTS = ExpertOptions(
    ExpertScores.SOFTMAX,
    layer_fields=("first_k_dense_replace",),
    has_shared=True,
    has_groups=True,
    methods=("greedy", "group_limited_greedy"),
)
_NOAUX_TC_EXPERTS = ExpertOptions(
    ExpertScores.SIGMOID,
    layer_fields=("first_k_dense_replace",),
    has_shared=True,
    has_groups=True,
    methods=("noaux_tc",),
    normalizes=ByConfig("norm_topk_prob", default=True),
)

_DEEPSEEK_V3 = DecoderOptions(
    model_types=("deepseek_v3", "kimi_k2"),
    is_latent=True,
    interleaves_rope=ByConfig("rope_interleave", default=True),
    qkv_bias=_BIAS,
    output_bias=_BIAS,
    experts=_NOAUX_TC_EXPERTS,
    defaults={
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 1,
    },
)
_OLMO2 = DecoderOptions(
    model_types=("olmo2",),
    qkv_bias=_BIAS,
    output_bias=_BIAS,
    qk_norm=QKNorm.ALL_HEADS,
    has_pre_norms=False,
    has_post_norms=True,
    defaults={"eos_token_id": 50_279},
)
_GEMMA2 = DecoderOptions(
    model_types=("gemma2",),
    qkv_bias=_BIAS,
    output_bias=_BIAS,
    has_query_scalar=True,
    windows=WindowRule.EVEN,
    activation_field="hidden_activation",
    activation=Activation.GELU_TANH,
    has_post_norms=True,
    adds_unit_offset=True,
    scales_embeddings=True,
    defaults={
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "eos_token_id": 1,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_QWEN2 = DecoderOptions(
    model_types=("qwen2", "qwen2_5_vl_text"),
    qkv_bias=True,
    windows=WindowRule.LATE,
    defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
)
_QWEN3 = replace(
    _QWEN2,
    model_types=("qwen3", "qwen3_vl_text"),
    qkv_bias=_BIAS,
    output_bias=_BIAS,
    qk_norm=QKNorm.EACH_HEAD,
    defaults={**_QWEN2.defaults, "head_dim": 128},
)

ARCHITECTURES: Final[Mapping[str, DecoderOptions]] = {
    "LlamaForCausalLM": DecoderOptions(
        model_types=("llama",),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=ByConfig("mlp_bias"),
        defaults={"eos_token_id": 2},
    ),
    "MistralForCausalLM": DecoderOptions(
        model_types=("mistral",),
        windows=WindowRule.ALL,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(
        _QWEN3,
        model_types=("qwen3_moe",),
        windows=WindowRule.NONE,
        experts=ExpertOptions(
            ExpertScores.SOFTMAX,
            count_fields=("num_experts", "num_local_experts"),
            layer_fields=("decoder_sparse_step", "mlp_only_layers"),
            normalizes=ByConfig("norm_topk_prob"),
        ),
        defaults={"num_key_value_heads": 4},
    ),
    "Qwen2MoeForCausalLM": replace(
        _QWEN2,
        model_types=("qwen2_moe",),
        qkv_bias=ByConfig("qkv_bias", default=True),
        windows=WindowRule.NONE,
        experts=ExpertOptions(
            ExpertScores.SOFTMAX,
            count_fields=("num_experts", "num_local_experts"),
            layer_fields=("decoder_sparse_step", "mlp_only_layers"),
            shared_size_field="shared_expert_intermediate_size",
            normalizes=ByConfig("norm_topk_prob"),
            tensors=ExpertTensors(shared="shared_expert", shared_gate="shared_expert_gate"),
        ),
        defaults={"num_key_value_heads": 16},
    ),
    "MixtralForCausalLM": DecoderOptions(
        model_types=("mixtral",),
        windows=WindowRule.ALL,
        experts=ExpertOptions(
            ExpertScores.SOFTMAX,
            count_fields=("num_local_experts", "num_experts"),
            inner_size_field="intermediate_size",
            normalizes=True,
            tensors=ExpertTensors(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        ),
        defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "eos_token_id": 2},
    ),
    "GraniteForCausalLM": DecoderOptions(
        model_types=("granite",),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=ByConfig("mlp_bias"),
        has_multipliers=True,
        defaults={"eos_token_id": 2},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        model_types=("olmo3",),
        windows=WindowRule.PATTERN,
        has_ropes_by_type=True,
        defaults={
            **_OLMO2.defaults,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
        },
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        model_types=("gemma3_text",),
        qk_norm=QKNorm.EACH_HEAD,
        windows=WindowRule.PATTERN,
        has_ropes_by_type=True,
        defaults={
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3,
        model_types=("deepseek_v2",),
        interleaves_rope=True,
        mlp_bias=ByConfig("mlp_bias"),
        experts=_DEEPSEEK_EXPERTS,
        defaults={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "eos_token_id": 2,
        },
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_types=("glm4_moe_lite",),
        experts=replace(_NOAUX_TC_EXPERTS, layer_fields=("mlp_layer_types",)),
        defaults={
            "q_lora_rank": 768,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "eos_token_id": 1,
        },
    ),
    "YoutuForCausalLM": replace(
        _DEEPSEEK_V3,
        model_types=("youtu",),
        experts=None,
        defaults={"q_lora_rank": 1536, "tie_word_embeddings": True, "eos_token_id": 128_001},
    ),
    "Glm4MoeForCausalLM": DecoderOptions(
        model_types=("glm4_moe",),
        qkv_bias=_BIAS,
        qk_norm=QKNorm.EACH_HEAD,
        has_qk_norm=ByConfig("use_qk_norm"),
        may_rotate_partially=True,
        experts=_NOAUX_TC_EXPERTS,
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "MiniMaxM2ForCausalLM": DecoderOptions(
        model_types=("minimax_m2",),
        qk_norm=QKNorm.ALL_HEADS,
        may_rotate_partially=True,
        experts=ExpertOptions(
            ExpertScores.SIGMOID,
            count_fields=("num_local_experts", "num_experts"),
            inner_size_field="intermediate_size",
            methods=("noaux_tc",),
            normalizes=True,
            tensors=ExpertTensors(
                block="block_sparse_moe",
                score_bias="e_score_correction_bias",
                gate="w1",
                up="w3",
                down="w2",
            ),
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5_000_000.0,
            "eos_token_id": 200_020,
        },
    ),
    "GptOssForCausalLM": DecoderOptions(
        model_types=("gpt_oss",),
        qkv_bias=ByConfig("attention_bias", default=True),
        output_bias=ByConfig("attention_bias", default=True),
        has_sinks=True,
        windows=WindowRule.EVEN,
        experts=ExpertOptions(
            ExpertScores.CHOSEN_SOFTMAX,
            count_fields=("num_local_experts", "num_experts"),
            inner_size_field="intermediate_size",
            clamps=True,
            tensors=ExpertTensors(router="router", router_bias="router.bias", stacked=True),
        ),
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        defaults={
            "sliding_window": 128,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150_000.0,
        },
    ),
}
"""The options of every architecture that runs, by transformers' name of it."""


def has(flag: Flag, config: ConfigFile) -> bool:
    """Whether a decoder has a property."""
    return flag if isinstance(flag, bool) else config.flag(flag.field, flag.default)
