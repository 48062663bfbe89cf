"""The count of what agents send without a meaning here: it is left out, and logged once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from kvrelay.router.metrics import LEFT_OUT, RouterMetrics

_log = logging.getLogger(__name__)
_MOST_NAMES: Final = 256
"""The most names that are told apart, so that no client makes a time series of each call."""
_MOST_CHARACTERS: Final = 64


class LeftOut:
    """The count of what is left out of calls.

    Args:
        metrics: the router's metrics.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._known: set[tuple[str, str]] = set()

    def note(self, path: str, names: Iterable[str]) -> None:
        """Count what was left out of a call of this path, and log what never was before.

        Args:
            path: the path.
            names: what was left out, such as ``tools.web_search_20250305``.
        """
        told = Counter([self._told(path, name[:_MOST_CHARACTERS]) for name in names])
        for name, number in told.items():
            self._metrics.count(LEFT_OUT, number, path=path, what=name)

    def _told(self, path: str, name: str) -> str:
        """Return the name by which something is counted; log it if it is new."""
        if (path, name) in self._known:
            return name
        if len(self._known) >= _MOST_NAMES or not name.isprintable():
            return "other"
        self._known.add((path, name))
        _log.warning("%s: %s has no meaning here, and is left out", path, name)
        return name


def unknown_members(model: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Return the names of members that a model of a body does not have, null ones apart."""
    fields = model.model_fields
    known = {fields[name].alias or name for name in fields}
    return [name for name, value in given.items() if name not in known and value is not None]
