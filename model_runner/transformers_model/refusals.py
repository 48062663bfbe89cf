"""The refusal of models whose code cannot be run over pages, with the reason in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvrelay.model_runner.errors import CheckpointError, ModelRunnerError, UnsupportedOptionError

FARTHEST: Final = 1 << 30
"""The length of contexts that models are told: windows longer than it are left out of masks."""
_SIGNS_OF_OWN_MASKS: Final = ("DescribedMask", str(FARTHEST))
"""The words of errors of models that compute with a mask: they name its class or its length."""


class ModelCodeError(ModelRunnerError):
    """A reason why transformers' code of a model cannot be run here; never leaves the room."""


@contextmanager
def refusing(path: Path, architecture: str, doing: str) -> Iterator[None]:
    """Turn whatever fails inside into a `CheckpointError` of one line, but for a user's option.

    Args:
        path: the file that the line begins with.
        architecture: the model's class.
        doing: what was tried, for errors that the model's own code raises.
    """
    try:
        yield
    except (CheckpointError, UnsupportedOptionError):
        raise
    except ModelCodeError as error:
        reason = str(error)
        raise CheckpointError(_line(path, architecture, reason)) from error
    # Model code raises whatever it meets.
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        reason = f"{doing} failed: {type(error).__name__}: {text}"
        if any(sign in text for sign in _SIGNS_OF_OWN_MASKS):
            reason = "it computes with its masks itself"
        raise CheckpointError(_line(path, architecture, reason)) from error


def _line(path: Path, architecture: str, reason: str) -> str:
    return f"{path}: {architecture} cannot be served by transformers' model code: {reason}"
