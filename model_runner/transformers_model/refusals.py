"""The refusal of models whose code cannot be run over pages, with the reason in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvrelay.model_runner.errors import CheckpointError, ModelRunnerError

_MASK: Final = "DescribedMask"
"""The class in place of a mask, which is none to compute with."""


class ModelCodeError(ModelRunnerError):
    """A reason why transformers' code of a model cannot be run here; never leaves the room."""


@contextmanager
def refusing(path: Path, architecture: str, doing: str) -> Iterator[None]:
    """Turn whatever fails inside into a `CheckpointError` of one line.

    Args:
        path: the file that the line begins with.
        architecture: the model's class.
        doing: what was tried, for errors that the model's own code raises.
    """
    try:
        yield
    except CheckpointError:
        raise
    except ModelCodeError as error:
        reason = str(error)
        raise CheckpointError(_line(path, architecture, reason)) from error
    # Model code raises whatever it meets.
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        reason = f"{doing} failed: {type(error).__name__}: {text}"
        if _MASK in text:
            reason = "it computes with its masks itself"
        raise CheckpointError(_line(path, architecture, reason)) from error


def _line(path: Path, architecture: str, reason: str) -> str:
    return f"{path}: {architecture} cannot be served by transformers' model code: {reason}"
