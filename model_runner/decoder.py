"""One dense decoder for every supported architecture: they differ in what is in the checkpoint."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvrelay.model_runner.attention import AttentionBackend, StepAttention
from kvrelay.model_runner.batch import ForwardBatch, Int64Array
from kvrelay.model_runner.checkpoint import Checkpoint
from kvrelay.model_runner.elementwise import Elementwise, make_elementwise, rms_norm
from kvrelay.model_runner.linear import Linear, make_linear
from kvrelay.model_runner.model_config import ModelConfig
from kvrelay.model_runner.rope import RotaryEmbedding

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a batch's positions, each ``[T, head_dim / 2]``."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class SelfAttention:
    """Queries, keys and values in one product; attention; the product back."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, elementwise: Elementwise
    ) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._elementwise = elementwise
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = fused_linear(checkpoint, prefix, parts, config.hidden_size, config.qkv_bias)
        output = {"o_proj": config.hidden_size}
        self._output = fused_linear(
            checkpoint, prefix, output, query_size, config.attention_output_bias
        )
        self._head_norm = self._load_head_norm(checkpoint, prefix) if config.qk_norm else None

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> torch.Tensor:
        """``residual + attention(x)``, all ``[T, hidden_size]``; writes `layer` of the pool."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        turning = self._num_heads + self._num_kv_heads
        if self._head_norm is not None:
            heads[:, :turning] = rms_norm(heads[:, :turning], self._head_norm, self._eps)
        self._elementwise.rotate(heads, turning, *rotation)
        return self._output.add_to(residual, attention.attend(layer, heads))

    def _load_head_norm(self, checkpoint: Checkpoint, prefix: str) -> torch.Tensor:
        """Weights of the query heads', then the key heads' norm, a row a head."""
        query = checkpoint.take(f"{prefix}.q_norm.weight", (self._head_dim,))
        key = checkpoint.take(f"{prefix}.k_norm.weight", (self._head_dim,))
        return torch.cat((query.expand(self._num_heads, -1), key.expand(self._num_kv_heads, -1)))


class FeedForward:
    """The gated product."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, elementwise: Elementwise
    ) -> None:
        self._elementwise = elementwise
        inner, hidden = config.intermediate_size, config.hidden_size
        self._gate_up = fused_linear(
            checkpoint, prefix, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias
        )
        self._down = fused_linear(checkpoint, prefix, {"down_proj": hidden}, inner, config.mlp_bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + feed_forward(x)``, all ``[T, hidden_size]``."""
        return self._down.add_to(residual, self._elementwise.silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Attention, then feed-forward, each normalized before and added after."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, index: int, elementwise: Elementwise
    ) -> None:
        prefix = f"model.layers.{index}"
        size = (config.hidden_size,)
        self._index = index
        self._eps = config.rms_norm_eps
        self._elementwise = elementwise
        self._input_norm = checkpoint.take(f"{prefix}.input_layernorm.weight", size)
        self._attention = SelfAttention(config, checkpoint, f"{prefix}.self_attn", elementwise)
        self._inner_norm = checkpoint.take(f"{prefix}.post_attention_layernorm.weight", size)
        self._feed_forward = FeedForward(config, checkpoint, f"{prefix}.mlp", elementwise)

    def attend(
        self, hidden: torch.Tensor, attention: StepAttention, rotation: Rotation
    ) -> torch.Tensor:
        """The layer's first half, the one in which tokens see each other."""
        normed = self._elementwise.rms_norm(hidden, self._input_norm, self._eps)
        return self._attention.add_to(hidden, normed, self._index, attention, rotation)

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's second half, each token by itself."""
        normed = self._elementwise.rms_norm(hidden, self._inner_norm, self._eps)
        return self._feed_forward.add_to(hidden, normed)


class Decoder:
    """A model's weights, ready to run; immutable once built."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._device = device
        self._elementwise = make_elementwise(dtype, device)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take(EMBEDDING, vocabulary)
        self._layers = [
            DecoderLayer(config, checkpoint, index, self._elementwise)
            for index in range(config.num_layers)
        ]
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            checkpoint.skip(HEAD)
            self._head = make_linear(self._embedding)
        else:
            self._head = make_linear(checkpoint.take(HEAD, vocabulary))
        checkpoint.finish()

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run `batch`, writing its keys and values into the pages of `attention`'s pool.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``.
        """
        step = attention.plan(batch)
        rotation = self._rotary(self._to_device(batch.positions))
        hidden = functional.embedding(self._to_device(batch.input_ids), self._embedding)
        *earlier, last = self._layers
        for layer in earlier:
            hidden = layer.feed_forward(layer.attend(hidden, step, rotation))
        hidden = last.attend(hidden, step, rotation)
        # From here on tokens do not see each other: only the wanted rows go on.
        if len(batch.logit_rows) == 0:
            return torch.empty(0, self._config.vocab_size, device=self._device)
        hidden = last.feed_forward(hidden[self._to_device(batch.logit_rows)])
        normed = self._elementwise.rms_norm(hidden, self._norm, self._config.rms_norm_eps)
        return self._head(normed).to(torch.float32)

    def _to_device(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def fused_linear(
    checkpoint: Checkpoint, prefix: str, parts: dict[str, int], inputs: int, has_bias: bool
) -> Linear:
    """One product for several of the checkpoint's: `parts` maps their names to output sizes."""
    weight = torch.cat(
        [
            checkpoint.take(f"{prefix}.{name}.weight", (outputs, inputs))
            for name, outputs in parts.items()
        ]
    )
    if not has_bias:
        return make_linear(weight)
    biases = [
        checkpoint.take(f"{prefix}.{name}.bias", (outputs,)) for name, outputs in parts.items()
    ]
    return make_linear(weight, torch.cat(biases))
