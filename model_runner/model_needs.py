"""The needs of a model, from its config.json alone: whose code, weights, and KV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.pool_layers import PoolLayers
from kvrelay.model_runner.config.weight_count import count_weights
from kvrelay.model_runner.runner import read_model
from kvrelay.model_runner.transformers_model.configuration import TransformersConfig
from kvrelay.model_runner.transformers_model.self_proof import prove_code


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The needs that a model has of its workers."""

    architecture: str
    code: ModelCode
    """Whose code computes it: native or transformers."""
    num_weights: int
    is_quantized: bool
    """Whether some weights are stored in fewer bits."""
    pools: tuple[PoolLayers, ...]
    max_model_len: int
    """The most tokens of a sequence."""

    def weight_bytes(self, bytes_each: int = 2) -> int:
        """The bytes of all weights, each of so many bytes."""
        return self.num_weights * bytes_each

    def kv_bytes(self, tokens: int, bytes_each: int = 2) -> int:
        """The bytes of one sequence's keys and values; windows keep their last tokens alone."""
        return sum(
            min(tokens, pool.window or tokens)
            * pool.num_layers
            * pool.num_kv_heads
            * pool.head_dim
            * (1 if pool.latent else 2)
            * bytes_each
            for pool in self.pools
        )


def find_needs(folder: Path, code: ModelCode = ModelCode.AUTO) -> ModelNeeds:
    """Find what the model of `folder`/config.json needs; no weights are read.

    Raises:
        CheckpointError: one line that says why it cannot run.
    """
    config = read_model(folder, code)
    if isinstance(config, TransformersConfig):
        prove_code(config)
        return ModelNeeds(
            config.architecture,
            ModelCode.TRANSFORMERS,
            config.count_weights(),
            False,
            config.pool_layers,
            config.max_model_len,
        )
    return ModelNeeds(
        config.architecture,
        ModelCode.NATIVE,
        count_weights(config),
        config.quantization is not None,
        config.pool_layers,
        config.max_model_len,
    )
