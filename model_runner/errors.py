"""What can go wrong in this room, as one small tree.

::

    ModelRunnerError
    ├── CheckpointError          the files of a model are not usable
    ├── UnsupportedOptionError   a dtype or device that is unknown, or not on this machine
    └── NonFiniteLogitsError     a forward gave NaN or infinite logits
"""

from __future__ import annotations


class ModelRunnerError(Exception):
    """Root of the tree."""


class CheckpointError(ModelRunnerError):
    """A checkpoint is missing something, broken or not supported: one line that names the file."""


class UnsupportedOptionError(ModelRunnerError):
    """An unknown dtype or device, or one that this machine lacks."""


class NonFiniteLogitsError(ModelRunnerError):
    """Some rows have no largest finite logit to sample from; nothing was sampled.

    Args:
        rows: indices into the sampled batch, so that only their requests need to fail.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(
            f"logits are not finite in rows {list(rows)}: refusing to sample from them"
        )
