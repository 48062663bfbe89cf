"""The sampling parameters of the model's own `generation_config.json`, for requests without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvrelay.v1 import inference_pb2
from kvrelay.wire.sampling_limits import LIMITS

AUTO: Final = "auto"
NONE: Final = "none"
_FILE: Final = "generation_config.json"
_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that are taken, with their names in both; the same as vLLM takes."""
_MOST_TOKENS: Final = "max_new_tokens"
_MOST: Final = (1 << 31) - 1
"""The largest integer of a message's field."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The parameters of requests that set none, and the model's bound of outputs."""

    parameters: Mapping[str, float] = field(default_factory=dict)
    """A value for each parameter that has one, by its name."""
    most_tokens: int | None = None
    """The most output tokens of any request; None: there is no bound."""

    def fill(self, params: inference_pb2.SamplingParams) -> None:
        """Set those parameters that are unset."""
        for name, value in self.parameters.items():
            if not params.HasField(name):
                setattr(params, name, value)

    def message(self) -> inference_pb2.SamplingParams:
        """Return them as a message."""
        params = inference_pb2.SamplingParams(max_tokens=self.most_tokens)
        self.fill(params)
        return params

    def members(self) -> dict[str, float]:
        """Return them as members of JSON."""
        most = {} if self.most_tokens is None else {"max_tokens": self.most_tokens}
        return {**self.parameters, **most}


NO_DEFAULTS: Final = SamplingDefaults()


def load_sampling_defaults(model_path: Path, where: str) -> SamplingDefaults:
    """Read the parameters.

    Args:
        model_path: the checkpoint's folder, which may have none.
        where: `auto` for that folder, `none`, or another folder, which must have them.

    Raises:
        ValueError: they cannot be read, or one of them is illegal; the text is one line.
    """
    if where == NONE:
        return NO_DEFAULTS
    path = (model_path if where == AUTO else Path(where)) / _FILE
    if where == AUTO and not path.exists():
        return NO_DEFAULTS
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path}: must be a JSON object")
    try:
        read = {name: _read(name, described.get(name)) for name in _NAMES}
        most = described.get(_MOST_TOKENS)
        if most is not None:
            _check_whole(_MOST_TOKENS, most, 1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return SamplingDefaults({name: one for name, one in read.items() if one is not None}, most)


def _read(name: str, value: Any) -> float | None:
    """Return a parameter's value; None: it has none. Raise ValueError if it is illegal."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: must be a number")
    if name == "top_k":
        _check_whole(name, value, -1)
        return max(int(value), 0)
    LIMITS[name].check(name, value)
    return float(value)


def _check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless a value is an integer from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ValueError(f"{name}: must be an integer of at least {least}")
