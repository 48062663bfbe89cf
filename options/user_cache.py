"""The place of a user's caches, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_home(variables: Mapping[str, str] = os.environ) -> Path:
    """XDG_CACHE_HOME, or ``~/.cache`` where it is unset or empty.

    Raises:
        ValueError: XDG_CACHE_HOME is not an absolute path.
        RuntimeError: it is unset, and the user has no home.
    """
    told = variables.get("XDG_CACHE_HOME", "")
    if not told:
        return Path.home() / ".cache"
    if not Path(told).is_absolute():
        raise ValueError(f"XDG_CACHE_HOME: {told!r} is not an absolute path")
    return Path(told)
