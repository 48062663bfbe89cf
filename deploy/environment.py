"""Every environment variable that the commands read or set, in one place.

Beside them `model_runner` reads XDG_CACHE_HOME for its compiled kernels, and `kv_transfer`
tells what UCX takes from UCX_TLS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvrelay.deploy.errors import DeployError
from kvrelay.router.auth import is_token

TOKEN_VARIABLE = "KVRELAY_TOKEN"  # noqa: S105 (a name)
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
    token: str | None = field(default=None, repr=False)
    """KVRELAY_TOKEN: what a client of a guarded cluster brings."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self:
        """Read and check; an empty variable counts as unset.

        Raises DeployError, naming the variable, for a value that cannot be used.
        """
        return cls(_cache_home(variables), _token(variables))


def _cache_home(variables: Mapping[str, str]) -> Path:
    cache_home = variables.get("XDG_CACHE_HOME", "")
    if not cache_home:
        return Path.home() / ".cache"
    if not Path(cache_home).is_absolute():
        raise DeployError(f"XDG_CACHE_HOME: {cache_home!r} is not an absolute path")
    return Path(cache_home)


def _token(variables: Mapping[str, str]) -> str | None:
    token = variables.get(TOKEN_VARIABLE, "")
    if token and not is_token(token):
        raise DeployError(f"{TOKEN_VARIABLE}: is not a token: letters, digits, -._~+/ and =")
    return token or None


def settle_ray() -> None:
    """Give Ray its settings, where the user has not; Ray reads them when it is imported."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
