"""The errors of the commands; each message is one line, written for the user.

- DeployError: any of them.
- OptionError, a DeployError: an option's value cannot be used.
- ModelError, a DeployError: no checkpoint could be found or made for the model.
- ClusterError, a DeployError: Ray or a worker did not start.
"""

from __future__ import annotations


class DeployError(Exception):
    """A failure whose message is one clear line for the user."""


class OptionError(DeployError):
    """The value of an option cannot be used."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option}: {problem}")
        self.option = option


class ModelError(DeployError):
    """No checkpoint could be found or made for the requested model."""


class ClusterError(DeployError):
    """Ray or a worker did not start."""
