"""The addresses of a cluster, from what `kvrelay serve` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final, Self

ANYWHERE: Final = tuple(f"--{door}=127.0.0.1:0" for door in ("grpc", "http", "admin", "metrics"))
"""Options of `kvrelay serve`: each at any free port."""


@dataclass(frozen=True, slots=True)
class Doors:
    """``host:port`` of each."""

    grpc: str
    http: str
    admin: str
    metrics: str
    """Of the controller."""

    @classmethod
    def printed(cls, text: str) -> Self:
        """Those in the ready lines; ValueError if one is missing."""
        found = {}
        for field in fields(cls):
            line = re.search(rf"(?im)^  {field.name} +(?:http://)?([\d.]+:\d+)", text)
            if line is None:
                raise ValueError(f"no {field.name} in what kvrelay serve printed:\n{text}")
            found[field.name] = line[1]
        return cls(**found)
