"""A decoder described by data: what `read_config` makes of a checkpoint's config.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.model_runner.query_heads import QueryHeads
from kvrelay.model_runner.rope import Rope


class Architecture(StrEnum):
    """The decoders that `Decoder` runs, by transformers' names."""

    LLAMA = "LlamaForCausalLM"
    """Biases by `attention_bias` and `mlp_bias`."""
    MISTRAL = "MistralForCausalLM"
    """No biases; in some every layer has a sliding window."""
    QWEN2 = "Qwen2ForCausalLM"
    """Biases on queries, keys and values, always; some layers may have a sliding window."""
    QWEN3 = "Qwen3ForCausalLM"
    """Each head's query and key is normalized; biases and windows by the configuration."""
    GEMMA2 = "Gemma2ForCausalLM"
    """Every other layer has a window; norms around each half layer; bent scores and logits."""
    GEMMA3 = "Gemma3ForCausalLM"
    """Gemma 2 with head norms instead of bends, and another rotation in layers with a window."""
    DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
    """Latent attention (MLA)."""
    DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
    """Latent attention, and another router of experts."""


class LayerType(StrEnum):
    """What a layer sees, by transformers' names."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


class Activation(StrEnum):
    """What the gate of a feed-forward goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Attention with keys and values a head, each shared by a group of query heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    normed: bool = False
    """Each head's query and key is normalized before it is rotated."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim

    @property
    def cached_heads(self) -> int:
        """Heads of a page."""
        return self.num_kv_heads

    @property
    def cached_dim(self) -> int:
        """Dimensions of a page's head."""
        return self.head_dim

    @property
    def queries(self) -> QueryHeads:
        """What a backend needs to know."""
        return QueryHeads(self.num_heads, self.head_dim, self.scale, self.softcap)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Keys and values of all heads are made from one latent a token, which is what
    pages hold; a key's other part, the rotary one, is shared by the heads as it is.
    """

    num_heads: int
    query_rank: int | None
    """Queries are made from a latent of this size; None: from the hidden state."""
    latent_dim: int
    """`kv_lora_rank`"""
    plain_dim: int
    """`qk_nope_head_dim`: dimensions of a head's query and key that do not rotate."""
    rotary_dim: int
    """`qk_rope_head_dim`: those that do."""
    value_dim: int
    """`v_head_dim`"""
    scale: float
    bias: bool
    """On the products into latents, and on the output."""
    interleaved: bool
    """Neighbouring dimensions turn together in the checkpoint, not those half a head apart."""

    @property
    def cached_heads(self) -> int:
        """Heads of a page."""
        return 1

    @property
    def cached_dim(self) -> int:
        """Dimensions of a page's head."""
        return self.latent_dim + self.rotary_dim

    @property
    def queries(self) -> QueryHeads:
        """What a backend needs to know: queries that were brought to the latent's space."""
        return QueryHeads(self.num_heads, self.latent_dim, self.scale)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward of many experts, of which each token goes to some."""

    count: int
    per_token: int
    inner_size: int
    shared_size: int
    """Inner size of the expert that every token goes to."""
    groups: int
    """Of equally many experts, of which a token goes only to those of its `best_groups`."""
    best_groups: int
    scaling: float
    """The chosen experts' weights are multiplied by it."""
    normalized: bool
    """After they were divided by their sum."""
    balanced: bool
    """V3's choice instead of V2's: see `ExpertRouter`."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between the layers of a model."""

    rope: Rope
    window: int | None = None
    """See `KVGeometry.window`."""
    experts: ExpertsConfig | None = None
    """None: one gated product."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and constants."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    heads: GroupedHeads | LatentHeads
    activation: Activation
    rms_norm_eps: float
    mlp_bias: bool
    tie_word_embeddings: bool
    max_model_len: int
    """Tokens of a sequence, prompt and output: `max_position_embeddings`."""
    eos_token_ids: tuple[int, ...]
    """Ascending; those of generation_config.json where it names any, else of config.json."""
    sandwich: bool = False
    """Each half layer's result is normalized too before it is added."""
    norms_less_one: bool = False
    """The checkpoint has norm weights less one, and they are applied in float32."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """Like `QueryHeads.softcap`, of the logits."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each pool that the layers need; full attention (None) first."""
        return tuple(sorted({layer.window for layer in self.layers}, key=lambda w: w or 0))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer: its pool, an index of `windows`, and its place among the pool's layers."""
        taken: Counter[int] = Counter()
        places = []
        for layer in self.layers:
            pool = self.windows.index(layer.window)
            places.append((pool, taken[pool]))
            taken[pool] += 1
        return tuple(places)
