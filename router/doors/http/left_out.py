"""The count of what agents send without a meaning here: it is left out, and logged once."""

from __future__ import annotations

import logging
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
        for name in names:
            shown = name[:_MOST_CHARACTERS]
            if (path, shown) not in self._known:
                if len(self._known) < _MOST_NAMES and shown.isprintable():
                    self._known.add((path, shown))
                    _log.warning("%s: %s has no meaning here, and is left out", path, shown)
                else:
                    shown = "other"
            self._metrics.count(LEFT_OUT, path=path, what=shown)


def unknown_members(model: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Return the names of members that a model of a body does not have, null ones apart."""
    fields = model.model_fields
    known = {fields[name].alias or name for name in fields}
    return [name for name, value in given.items() if name not in known and value is not None]
