"""The names of a checkpoint's tensors as a decoder asks for them, whatever it is wrapped in."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvrelay.model_runner.errors import CheckpointError

logger = logging.getLogger(__name__)

_PREFIXES: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""The prefixes of a decoder within a model for images, and those that it has alone."""
_OTHER_PARTS: Final = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector)\."
)
"""The parts of a model for images that text does not pass."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_MTP_PRODUCT: Final = ".eh_proj."
"""The product that joins embedding and hidden state in layers that predict further tokens."""


def name_tensors(stored: Mapping[str, Path], num_layers: int) -> Mapping[str, str]:
    """Map the names that a decoder asks for to the stored ones.

    Tensors of other parts are left out, and so are layers from `num_layers` on that predict further
    tokens (MTP), which no layer below reads. A line in the log counts them.

    Args:
        stored: the names, with the file of each.
        num_layers: the layers of the decoder.

    Raises:
        CheckpointError: two tensors have one name.
    """
    names: dict[str, str] = {}
    parts: Counter[str] = Counter()
    beyond = 0
    predicting = {_layer_of(_plain_name(one)) for one in stored if _MTP_PRODUCT in one}
    for name, path in stored.items():
        if part := _OTHER_PARTS.match(name):
            parts[part[2]] += 1
            continue
        plain = _plain_name(name)
        layer = _layer_of(plain)
        if layer in predicting and layer >= num_layers:
            beyond += 1
        elif plain in names:
            raise CheckpointError(f"{path}: tensors {names[plain]} and {name} have one place")
        else:
            names[plain] = name
    if parts:
        logger.info(
            "%d tensors are left out, of parts that text does not pass: %s",
            parts.total(),
            ", ".join(sorted(parts)),
        )
    if beyond:
        logger.info(
            "%d tensors are left out, of layers behind the %d of the model: they predict further "
            "tokens (MTP)",
            beyond,
            num_layers,
        )
    return names


def _layer_of(name: str) -> int:
    """The layer of a tensor; -1: it is of none."""
    layer = _LAYER.match(name)
    return int(layer[1]) if layer else -1


def _plain_name(name: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
