"""The errors of model_runner.

::

    ModelRunnerError
    ├── CheckpointError          the files of a model are not usable
    │   └── NotNativeError       no decoder of ours computes it
    ├── UnsupportedOptionError   a dtype or device that is unknown, or not on this machine
    ├── DependencyError          a package has changed in what is used of it
    └── NonFiniteLogitsError     a row of logits has nothing to sample
        └── NothingAllowedError  as all its tokens are forbidden
"""

from __future__ import annotations


class ModelRunnerError(Exception):
    """Base of every error of model_runner."""


class CheckpointError(ModelRunnerError):
    """A checkpoint is missing something, broken or not supported: one line that names the file."""


class NotNativeError(CheckpointError):
    """An architecture, or a variant of one, that no decoder of ours computes."""


class UnsupportedOptionError(ModelRunnerError):
    """An unknown dtype or device, or one that this machine lacks."""


class DependencyError(ModelRunnerError):
    """The inner workings of a package, which are used here, have changed: one line."""


class NonFiniteLogitsError(ModelRunnerError):
    """One row has no largest finite logit to sample.

    Never raised: it stands in the place of the row's token, and the other rows have theirs.
    """


class NothingAllowedError(NonFiniteLogitsError):
    """Each token of the row is banned, or impossible."""
