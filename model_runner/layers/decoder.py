"""One decoder for every supported architecture, put together by `ModelConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.attention.backend import AttentionBackend, StepAttention
from kvrelay.model_runner.batch import ForwardBatch, input_ids_on
from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.config.model_config import ModelConfig
from kvrelay.model_runner.layers.elementwise import Elementwise, Rotation
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.feed_forward import make_feed_forward
from kvrelay.model_runner.layers.hidden import Hidden
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.layers.loader import WeightLoader
from kvrelay.model_runner.layers.rotary_embedding import RotaryEmbedding
from kvrelay.model_runner.layers.self_attention import make_self_attention
from kvrelay.model_runner.torch_options import to_device

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The part of a batch that `Decoder.compute` reads, on the device."""

    input_ids: torch.Tensor
    """``[T]`` int64"""
    positions: torch.Tensor
    """``[T]`` int64"""
    logit_rows: torch.Tensor
    """``[S]`` int64"""

    @classmethod
    def of(cls, batch: ForwardBatch, device: torch.device) -> StepInputs:
        """Copy the inputs of `batch` to the device."""
        others = (to_device(array, device) for array in (batch.positions, batch.logit_rows))
        return cls(input_ids_on(batch, device), *others)


class DecoderLayer:
    """A layer: attention, then feed-forward, each normalized before and added after."""

    def __init__(self, loader: WeightLoader, index: int) -> None:
        config = loader.config
        prefix = f"model.layers.{index}"
        self.pool, self._place = config.layer_pools[index]
        self.rope = config.layers[index].rope
        after = f"{prefix}.post_attention_layernorm"
        before = f"{prefix}.pre_feedforward_layernorm" if config.post_norms else after
        self._input_norm = loader.pre_norm(f"{prefix}.input_layernorm")
        self._attention = make_self_attention(loader, f"{prefix}.self_attn", after)
        self._inner_norm = loader.pre_norm(before)
        self._feed_forward = make_feed_forward(
            loader,
            config.layers[index].moe,
            prefix,
            f"{prefix}.post_feedforward_layernorm",
        )

    def attend(self, hidden: Hidden, attention: StepAttention, rotation: Rotation) -> Hidden:
        """The layer's first half, the one in which tokens see each other."""
        normed, residual = self._input_norm.add(hidden)
        return self._attention.add_to(residual, normed, self._place, attention, rotation)

    def feed_forward(self, hidden: Hidden) -> Hidden:
        """The layer's second half, each token by itself."""
        normed, residual = self._inner_norm.add(hidden)
        return self._feed_forward.add_to(residual, normed)


class Decoder:
    """A model's weights, ready to run; immutable once built."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        linears: LinearFactory,
        elementwise: Elementwise,
        experts: ExpertFactory,
        threads: KernelThreads,
    ) -> None:
        self._config = config
        self._threads = threads
        self._device = device
        self._elementwise = elementwise
        loader = WeightLoader(config, checkpoint, elementwise, linears, experts)
        self._rotaries = {
            layer.rope: RotaryEmbedding(
                layer.rope, config.attention.rotary_dim, device, elementwise
            )
            for layer in config.layers
        }
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take(EMBEDDING, vocabulary)
        # Rounded to the model's dtype, as Gemma was trained.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(device, dtype)
        self._layers = [DecoderLayer(loader, index) for index in range(len(config.layers))]
        self._norm = loader.norm("model.norm", config.hidden_size)
        if config.tie_word_embeddings and not checkpoint.has_other(HEAD, self._embedding):
            checkpoint.skip(HEAD)
            self._head = linears.make(self._embedding)
        else:
            self._head = loader.head(HEAD.removesuffix(".weight"), vocabulary)
        checkpoint.finish()

    def forward(self, batch: ForwardBatch, backends: Sequence[AttentionBackend]) -> torch.Tensor:
        """Run `batch`, writing its keys and values into the pages of the backends' pools.

        Args:
            batch: the input, with a page table for each pool.
            backends: one for each of `ModelConfig.pool_windows`.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``.
        """
        steps = [
            backend.plan(batch, table)
            for backend, table in zip(backends, batch.page_tables, strict=True)
        ]
        return self.compute(StepInputs.of(batch, self._device), steps)

    def compute(self, inputs: StepInputs, steps: Sequence[StepAttention]) -> torch.Tensor:
        """Compute logits of a planned batch on the device: nothing comes from the host."""
        rotations = {
            rope: self._elementwise.prepare(rotary(inputs.positions))
            for rope, rotary in self._rotaries.items()
        }
        hidden = Hidden(self._embed(inputs.input_ids))
        *earlier, last = self._layers
        for layer in earlier:
            self._threads.renew()
            hidden = layer.attend(hidden, steps[layer.pool], rotations[layer.rope])
            hidden = layer.feed_forward(hidden)
        self._threads.renew()
        hidden = last.attend(hidden, steps[last.pool], rotations[last.rope])
        # From here on tokens do not see each other: only the wanted rows go on.
        if len(inputs.logit_rows) == 0:
            return torch.empty(0, self._config.vocab_size, device=self._device)
        return self._logits(last.feed_forward(hidden.take(inputs.logit_rows)))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = functional.embedding(input_ids, self._embedding)
        if self._config.embedding_multiplier != 1:
            hidden = hidden * self._config.embedding_multiplier
        if self._config.embedding_scale == 1:
            return hidden
        return hidden * self._embedding_scale

    def _logits(self, hidden: Hidden) -> torch.Tensor:
        normed, _ = self._norm.add(hidden)
        logits = self._head(normed).to(torch.float32)
        if self._config.logits_scaling != 1:
            logits = logits / self._config.logits_scaling
        most = self._config.final_logit_softcapping
        return logits if most is None else self._elementwise.softcap(logits, most)
