"""The weights of a model of transformers, converted by its own rules, with nothing left over.

Its own lists of tensors that may be left over, or be missing, are honoured; the log names them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
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

logger = logging.getLogger(__name__)

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")
_DERIVED: Final = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Patterns of what old checkpoints have and the configuration says already."""


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
    # transformers' lists are applied here, where what they leave out is logged.
    own = {"_adjust_missing_and_unexpected_keys": _leave_keys, "__module__": cls.__module__}
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
    _check_loaded(config, model, info)
    digest = WeightsDigest()
    for name, tensor in model.state_dict().items():
        digest.add(name, tensor)
        on_read(tensor.nbytes)
    model.eval().to(device)
    hold_frequencies(model)
    return model, digest.hexdigest()


def _leave_keys(model: Any, info: Any) -> None:
    """Stand where transformers drops the names that its lists ignore: drop none."""


def _check_loaded(config: TransformersConfig, model: Any, info: Any) -> None:
    """Refuse weights that were not read, or are not there."""
    folder, layers = config.path.parent, config.config.get_text_config(decoder=True)
    ignored = _ignored_missing(model, info["missing_keys"])
    if missing := sorted(set(info["missing_keys"]) - ignored):
        name, *others = missing
        raise CheckpointError(f"{folder}: tensor {name} is missing{_more(others)}")
    if info["mismatched_keys"]:
        (name, stored, expected), *others = sorted(info["mismatched_keys"])
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(stored)}, expected {list(expected)}"
            f"{_more(others)}"
        )
    patterns = (*_DERIVED, *(model._keys_to_ignore_on_load_unexpected or ()))
    left_out = _matching(patterns, info["unexpected_keys"])
    left_out |= {
        one for one in info["unexpected_keys"] if _is_beyond(one, layers.num_hidden_layers)
    }
    if left := sorted(set(info["unexpected_keys"]) - left_out):
        name, *others = left
        raise CheckpointError(
            f"{folder}: tensor {name} has no place in this architecture{_more(others)}"
        )
    for names, what in ((left_out, "is left out"), (ignored, "is missing, which may be")):
        if names:
            name, *others = sorted(names)
            logger.warning("%s: tensor %s %s%s", folder, name, what, _more(others))


def _ignored_missing(model: Any, missing: Iterable[str]) -> set[str]:
    """The missing tensors that the model's own list lets be, if all of a pattern are missing."""
    ignored: set[str] = set()
    for pattern in model._keys_to_ignore_on_load_missing or ():
        every = _matching((pattern,), model.state_dict())
        if every <= set(missing):
            ignored |= every
    return ignored


def _matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The names in which one of some regular expressions is found."""
    found = list(map(re.compile, patterns))
    return {name for name in names if any(one.search(name) for one in found)}


def _is_beyond(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer after the model's: such layers draft tokens (MTP)."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


def _more(others: list[str]) -> str:
    return f" (and {len(others)} more)" if others else ""
