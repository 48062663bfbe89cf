"""A decoder's shape and constants, as `read_config` makes them of a checkpoint's config.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvrelay.model_runner.config.moe_backend import ClampedSilu
from kvrelay.model_runner.config.pool_layers import PoolLayers
from kvrelay.model_runner.config.quantization import Quantization
from kvrelay.model_runner.config.query_heads import ExpandedHeads, QueryHeads
from kvrelay.model_runner.config.rope import Rope


class LayerType(StrEnum):
    """The tokens that a layer attends to, by transformers' names."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


class Activation(StrEnum):
    """The function of a feed-forward's gate, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class QKNorm(StrEnum):
    """The norms of queries and keys before they are rotated."""

    NONE = "none"
    EACH_HEAD = "each_head"
    """Each head is normalized by itself, all by one weight."""
    ALL_HEADS = "all_heads"
    """All query heads of a token are normalized as one, and so are its key heads."""


class ExpertScores(StrEnum):
    """The scores by which a router chooses experts, and which become weights."""

    SOFTMAX = "softmax"
    """The softmax over all experts."""
    SIGMOID = "sigmoid"
    """Sigmoids; a bias is added for the choice alone (`noaux_tc`, DeepSeek-V3)."""
    CHOSEN_SOFTMAX = "chosen_softmax"
    """Logits for the choice; the softmax over the chosen ones for the weights (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class GQAConfig:
    """Grouped-query attention: a head of keys and values is shared by a group of query heads.

    Ainslie et al. (arXiv 2305.13245). With as many groups as heads it is plain multi-head
    attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it."""
    softcap: float | None = None
    """`attn_logit_softcapping`: `QueryHeads.softcap`."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    partial_rotary_dim: int | None = None
    """The leading dimensions of a head that rotate; None: all do."""
    has_sinks: bool = False
    """Each query head has a score of its own in the softmax, which weighs no value."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.partial_rotary_dim or self.head_dim

    @property
    def num_cached_heads(self) -> int:
        """Heads of a token in a page."""
        return self.num_kv_heads

    @property
    def cached_head_dim(self) -> int:
        """Dimensions of a head in a page."""
        return self.head_dim

    @property
    def query_heads(self) -> QueryHeads:
        """The heads whose queries an attention backend receives."""
        return QueryHeads(self.num_heads, self.head_dim, self.scale, self.softcap)


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Keys and values of all heads are made from one latent a token, and pages hold the latent. A
    key's other part, the rotary one, is shared by the heads as it is.
    """

    num_heads: int
    q_lora_rank: int | None
    """The size of the latent that queries are made from; None: the hidden state."""
    kv_lora_rank: int
    """The size of the latent that keys and values are made from."""
    qk_nope_head_dim: int
    """Dimensions of a head's query and key that do not rotate."""
    qk_rope_head_dim: int
    """Dimensions of a head's query and key that rotate."""
    v_head_dim: int
    """Dimensions of a head's value."""
    scale: float
    """Scores are multiplied by it."""
    attention_bias: bool
    """Biases on the products into latents, and on the output."""
    rope_interleave: bool
    """Whether neighbouring dimensions turn together in the checkpoint, not dim / 2 apart."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.qk_rope_head_dim

    @property
    def num_cached_heads(self) -> int:
        """Heads of a token in a page: the latent and the rotated key, as one."""
        return 1

    @property
    def cached_head_dim(self) -> int:
        """Dimensions of a head in a page."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_heads(self) -> QueryHeads:
        """The heads whose queries an attention backend receives, brought to the latent's space."""
        return QueryHeads(self.num_heads, self.kv_lora_rank, self.scale)

    @property
    def expanded_heads(self) -> ExpandedHeads | None:
        """The heads of keys and values made of latents; None if to make them never costs less.

        For each head a key and a value are made once, by ``rank * (nope + value)`` products. Each
        new token that sees them then takes ``2 * rank - nope - value`` products less.
        """
        made = self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * self.kv_lora_rank - made
        if saved <= 0:
            return None
        return ExpandedHeads(
            key_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            least_new_tokens=self.kv_lora_rank * made // saved + 1,
        )


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The names of a mixture's tensors, below their layer."""

    block: str = "mlp"
    """The prefix of all others."""
    router: str = "gate"
    router_bias: str | None = None
    """The bias of the router's logits; None: it has none."""
    score_bias: str = "gate.e_score_correction_bias"
    """The bias of `ExpertScores.SIGMOID`."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    """The expert of all tokens."""
    shared_gate: str | None = None
    """The product that weighs its result by a sigmoid; None: it counts whole."""
    stacked: bool = False
    """All experts are one tensor, inputs before outputs, in which gate and up alternate."""


DEEPSEEK_NAMES: Final = ExpertTensors()
"""The names of most models."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A feed-forward that is a mixture of experts, by the names of transformers."""

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Inner size of a routed expert."""
    shared_intermediate_size: int
    """Inner size of the shared expert, which every token goes to; 0: there is none."""
    n_group: int
    """The number of equal groups of experts; a token uses only its `topk_group` best groups."""
    topk_group: int
    routed_scaling_factor: float
    """The chosen experts' weights are multiplied by it."""
    norm_topk_prob: bool
    """Before that, the weights are divided by their sum."""
    scores: ExpertScores
    tensors: ExpertTensors = DEEPSEEK_NAMES
    clamped: ClampedSilu | None = None
    """The activation of experts; None: the model's."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The properties that may differ between the layers of a model."""

    rope: Rope
    sliding_window: int | None = None
    """The number of last tokens that a token sees, itself included; None: it sees all."""
    moe: MoEConfig | None = None
    """The layer's experts; None: it has one gated product."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and constants."""

    architecture: str
    """The name by which transformers has it."""
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    attention: GQAConfig | MLAConfig
    activation: Activation
    rms_norm_eps: float
    mlp_bias: bool
    tie_word_embeddings: bool
    max_model_len: int
    """The most tokens of a sequence, prompt and output: `max_position_embeddings`."""
    eos_token_ids: tuple[int, ...]
    """The end-of-sequence tokens, ascending, of generation_config.json or else config.json."""
    pre_norms: bool = True
    """The inputs of attention and feed-forward are normalized."""
    post_norms: bool = False
    """The results of attention and feed-forward are normalized too before they are added."""
    add_unit_offset: bool = False
    """Norm weights are stored less one, and applied in float32 (Gemma)."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it, rounded to their dtype (Gemma)."""
    embedding_multiplier: float = 1.0
    """Embeddings are multiplied by it as it is (Granite)."""
    residual_multiplier: float = 1.0
    """The results of attention and feed-forward are multiplied by it before they are added."""
    logits_scaling: float = 1.0
    """Logits are divided by it."""
    final_logit_softcapping: float | None = None
    """Logits become ``softcap * tanh(logit / softcap)``."""
    quantization: Quantization | None = field(default=None, repr=False)
    """The quantization of weights; None: they are not quantized.

    It is not in the `repr`: hashes of the weights tell such models apart.
    """

    @property
    def pool_windows(self) -> tuple[int | None, ...]:
        """The window of each pool that the layers need; full attention (None) first."""
        return tuple(sorted({layer.sliding_window for layer in self.layers}, key=lambda w: w or 0))

    @property
    def pool_layers(self) -> tuple[PoolLayers, ...]:
        """The layers of each pool, by `pool_windows`."""
        heads = self.attention
        return tuple(
            PoolLayers(
                num_layers=sum(layer.sliding_window == window for layer in self.layers),
                num_kv_heads=heads.num_cached_heads,
                head_dim=heads.cached_head_dim,
                latent=isinstance(heads, MLAConfig),
                window=window,
            )
            for window in self.pool_windows
        )

    @property
    def layer_pools(self) -> tuple[tuple[int, int], ...]:
        """The place of each layer: its pool, by `pool_windows`, and its index in that pool."""
        taken: Counter[int] = Counter()
        layer_pools = []
        for layer in self.layers:
            pool = self.pool_windows.index(layer.sliding_window)
            layer_pools.append((pool, taken[pool]))
            taken[pool] += 1
        return tuple(layer_pools)
