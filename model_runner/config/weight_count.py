"""The number of a model's weights, from its configuration alone."""

from __future__ import annotations

from kvrelay.model_runner.config.model_config import (
    ExpertScores,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    QKNorm,
)


def count_weights(config: ModelConfig) -> int:
    """Count the numbers that `Decoder` reads; a head that config.json ties counts once."""
    hidden = config.hidden_size
    heads = config.attention
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    attention = (
        _count_mla(heads, hidden) if isinstance(heads, MLAConfig) else _count_gqa(heads, hidden)
    )
    norms = 2 * (config.pre_norms + config.post_norms) * hidden
    dense = _count_gated(hidden, config.intermediate_size, has_bias=config.mlp_bias)
    return (
        tables
        + hidden
        + sum(
            attention + norms + (dense if layer.moe is None else _count_experts(layer.moe, hidden))
            for layer in config.layers
        )
    )


def _count_gqa(heads: GQAConfig, hidden: int) -> int:
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    outputs = queries + 2 * keys
    norms = {QKNorm.NONE: 0, QKNorm.EACH_HEAD: 2 * heads.head_dim, QKNorm.ALL_HEADS: queries + keys}
    return (
        hidden * (outputs + queries)
        + outputs * heads.qkv_bias
        + hidden * heads.output_bias
        + norms[heads.qk_norm]
        + heads.num_heads * heads.has_sinks
    )


def _count_mla(heads: MLAConfig, hidden: int) -> int:
    rank, biased = heads.q_lora_rank, heads.attention_bias
    queries = heads.num_heads * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
    of_queries = hidden * queries
    if rank is not None:
        of_queries = hidden * rank + rank * biased + rank + rank * queries
    made = heads.num_heads * (heads.qk_nope_head_dim + heads.v_head_dim)
    return (
        of_queries
        + hidden * heads.cached_head_dim
        + heads.cached_head_dim * biased
        + heads.kv_lora_rank * (1 + made)
        + heads.num_heads * heads.v_head_dim * hidden
        + hidden * biased
    )


def _count_gated(hidden: int, inner: int, *, has_bias: bool) -> int:
    return 3 * hidden * inner + (2 * inner + hidden) * has_bias


def _count_experts(experts: MoEConfig, hidden: int) -> int:
    count, names = experts.n_routed_experts, experts.tensors
    of_scores = (experts.scores is ExpertScores.SIGMOID) + (names.router_bias is not None)
    one = _count_gated(hidden, experts.moe_intermediate_size, has_bias=names.stacked)
    shared = 3 * hidden * experts.shared_intermediate_size
    return count * (hidden + of_scores + one) + shared + hidden * (names.shared_gate is not None)
