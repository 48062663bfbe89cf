"""The configuration of a model whose code is transformers', and its class."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.config_reader import CONFIG_NAME, read_eos_token_ids
from kvrelay.model_runner.config.pool_layers import PoolLayers
from kvrelay.model_runner.transformers_model.layout import Layout, find_layout
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError, refusing
from kvrelay.model_runner.transformers_model.rope_lengths import hold_frequencies, steady_length

logger = logging.getLogger(__name__)

_LONGEST: Final = 1 << 20
"""The length that masks are asked for where a configuration says none."""


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A model whose code is transformers', as far as others need to know it."""

    architecture: str
    """The name of its class."""
    vocab_size: int
    max_model_len: int
    """The most tokens of a sequence, prompt and output."""
    eos_token_ids: tuple[int, ...]
    version: str
    """The version of transformers: another may compute other bits."""
    fields: str
    """All fields of its configuration as JSON, but for the folder that it came from."""
    layout: Layout = field(repr=False)
    """The layout of its forwards; it follows from the others."""
    config: Any = field(repr=False, compare=False)
    """transformers' configuration."""
    path: Path = field(repr=False, compare=False)
    """The path of config.json."""

    @property
    def pool_layers(self) -> tuple[PoolLayers, ...]:
        """The layers of each pool."""
        return self.layout.pools

    def count_weights(self) -> int:
        """Count the model's weights; one that several modules share counts once."""
        with torch.device("meta"), quietly():
            model = make_model(self.config, self.architecture, torch.bfloat16)
        return sum(weight.numel() for weight in model.parameters())


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Read `folder`/config.json for transformers' own code.

    Raises:
        CheckpointError: one line; transformers has no such model, or it cannot be run over pages.
    """
    path = folder / CONFIG_NAME
    fields = ConfigFile.read(path)
    architecture = _architecture(fields)
    with refusing(path, architecture, "its configuration"):
        config = _read(folder)
        if any(map(_is_quantized, (config, config.get_text_config(decoder=True)))):
            raise fields.error(
                "quantization_config", "is not supported by transformers' model code (--model-code)"
            )
        model_class(config, architecture)
        described = describe(config, architecture, path, _eos_token_ids(fields, config, folder))
    if described.max_model_len == steady_length(config.get_text_config(decoder=True)):
        length = described.max_model_len
        logger.warning("sequences end at %d tokens: beyond, its rotation follows others", length)
    return described


def describe(
    config: Any, architecture: str, path: Path, eos_token_ids: tuple[int, ...]
) -> TransformersConfig:
    """Describe a model of a configuration; `ModelCodeError`: it cannot be run over pages."""
    import transformers

    text = config.get_text_config(decoder=True)
    with torch.device("meta"), quietly():
        # In a type that products of experts have everywhere.
        model = make_model(config, architecture, torch.bfloat16)
    _refuse_states(model)
    longest = getattr(text, "max_position_embeddings", None)
    steady = steady_length(text)
    known = [one for one in (longest, steady) if one is not None]
    layout = find_layout(model, min(known, default=_LONGEST))
    if longest is None:
        raise ModelCodeError("its configuration says no max_position_embeddings")
    return TransformersConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        max_model_len=min(known),
        eos_token_ids=eos_token_ids,
        version=transformers.__version__,
        fields=json.dumps(_without_places(config.to_dict()), sort_keys=True, default=str),
        layout=layout,
        config=config,
        path=path,
    )


def model_class(config: Any, architecture: str) -> Any:
    """Find transformers' class of that name for a configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = found if isinstance(found, tuple) else (found,)
    for one in classes:
        if one is not None and one.__name__ == architecture:
            return one
    if config.get_text_config(decoder=True) is not config:
        raise ModelCodeError("it takes more than text, and its decoder is not served alone")
    raise ModelCodeError(f"{type(config).__name__} has no causal language model of that name")


def make_model(config: Any, architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model of a configuration, on the default device and with random weights."""
    model = model_class(config, architecture)._from_config(config, dtype=dtype).eval()
    hold_frequencies(model)
    return model


def _architecture(fields: ConfigFile) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must name one architecture, got {names!r}")
    return names[0]


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    with quietly():
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _eos_token_ids(fields: ConfigFile, config: Any, folder: Path) -> tuple[int, ...]:
    return read_eos_token_ids(fields, folder, config.get_text_config(decoder=True).vocab_size)


def _is_quantized(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _without_places(value: Any) -> Any:
    """Leave out the folders that configurations were read from, in nested ones too."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name != "_name_or_path"}
        return {name: _without_places(one) for name, one in kept.items()}
    return [_without_places(one) for one in value] if isinstance(value, list) else value


def _refuse_states(model: Any) -> None:
    """Refuse a model whose layers keep a state: it has no pages."""
    for cls in {type(module): None for module in model.modules()}:
        if not cls.__module__.startswith("transformers.models"):
            continue
        source = inspect.getsource(cls.forward)
        if "update_conv_state(" in source or "update_recurrent_state(" in source:
            raise ModelCodeError(f"it keeps a state ({cls.__name__})")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the log inside."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
