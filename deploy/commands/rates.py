"""A router's activity a second, from two of its reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Rates:
    """Events a second between two reports, by the router's own clock."""

    ended_requests: float
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def between(cls, before: dict[str, Any] | None, now: dict[str, Any]) -> Self | None:
        """Return the rates between two reports of `kvrelay status --json`.

        None: there is only one, the router does not tell this caller, or it has restarted.
        """
        if before is None or not before["requests"] or not now["requests"]:
            return None
        seconds = now["uptime_seconds"] - before["uptime_seconds"]
        if seconds <= 0:
            return None
        earlier, later = before["requests"], now["requests"]
        ended = sum(later["ended"].values()) - sum(earlier["ended"].values())
        return cls(
            ended / seconds,
            (later["prompt_tokens"] - earlier["prompt_tokens"]) / seconds,
            (later["output_tokens"] - earlier["output_tokens"]) / seconds,
        )
