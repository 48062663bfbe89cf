"""Every environment variable that kvrelay reads or sets, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvrelay.deploy.errors import DeployError

_RAY_SETTINGS = {
    # No usage report leaves the machine, and no notice about it is printed.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Said aloud, the default is not announced at every start.
    "RAY_AUTH_MODE": "token",
    # Chooses the behaviour that Ray otherwise warns of as coming.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A dead worker gets one line from its supervisor instead of Ray's paragraph.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What kvrelay takes from its environment."""

    cache_home: Path
    """XDG_CACHE_HOME, or ``~/.cache``: converted models lie below it."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self:
        """Read and check; an empty variable counts as unset.

        Raises DeployError, naming the variable, for a value that cannot be used.
        """
        cache_home = variables.get("XDG_CACHE_HOME", "")
        if not cache_home:
            return cls(cache_home=Path.home() / ".cache")
        if not Path(cache_home).is_absolute():
            raise DeployError(f"XDG_CACHE_HOME: {cache_home!r} is not an absolute path")
        return cls(cache_home=Path(cache_home))


def settle_ray() -> None:
    """Give Ray its settings, where the user has not; Ray reads them when it is imported."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
