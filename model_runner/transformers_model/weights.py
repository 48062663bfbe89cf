"""The weights of a model of transformers, converted by its own rules, with nothing left over."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch

from kvrelay.model_runner.checkpoint.digest import WeightsDigest
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.transformers_model.configuration import (
    TransformersConfig,
    model_class,
    quietly,
)
from kvrelay.model_runner.transformers_model.refusals import refusing
from kvrelay.model_runner.transformers_model.rope_lengths import hold_frequencies

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")
_FREQUENCIES: Final = "rotary_emb.inv_freq"
"""The end of the names of frequencies in old checkpoints; the configuration has them already."""


def load_model(
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[int], None],
) -> tuple[Any, str]:
    """Load the weights of a model, converted by transformers' rules. Return it and their digest.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
    """
    folder = config.path.parent
    cls = model_class(config.config, config.architecture)
    # Nothing is ignored in silence: MTP layers by a number of one model, for example.
    own = {"_keys_to_ignore_on_load_unexpected": None, "__module__": cls.__module__}
    strict: Any = type(cls.__name__, (cls,), own)
    with refusing(config.path, config.architecture, "loading its weights"), quietly():
        model, info = strict.from_pretrained(
            folder,
            config=config.config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_loaded(config, info)
    digest = WeightsDigest()
    for name, tensor in model.state_dict().items():
        digest.add(name, tensor)
        on_read(tensor.nbytes)
    model.eval().to(device)
    hold_frequencies(model)
    return model, digest.hexdigest()


def _check_loaded(config: TransformersConfig, info: Any) -> None:
    """Refuse weights that were not read, or are not there."""
    folder, layers = config.path.parent, config.config.get_text_config(decoder=True)
    if info["missing_keys"]:
        name, *others = sorted(info["missing_keys"])
        raise CheckpointError(f"{folder}: tensor {name} is missing{_more(others)}")
    if info["mismatched_keys"]:
        (name, stored, expected), *others = sorted(info["mismatched_keys"])
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(stored)}, expected {list(expected)}"
            f"{_more(others)}"
        )
    left = [
        name
        for name in sorted(info["unexpected_keys"])
        if not name.endswith(_FREQUENCIES) and not _is_beyond(name, layers.num_hidden_layers)
    ]
    if left:
        name, *others = left
        raise CheckpointError(
            f"{folder}: tensor {name} has no place in this architecture{_more(others)}"
        )


def _is_beyond(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer after the model's: such layers draft tokens (MTP)."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def _more(others: list[str]) -> str:
    return f" (and {len(others)} more)" if others else ""
