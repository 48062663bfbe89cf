"""What was measured so far, one line each, so that a run that was cut off can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


class Kind(StrEnum):
    """What a measurement is about."""

    LOAD = "load"  # a closed loop
    PROBE = "probe"  # one rate on the way to the goodput
    INTERFERENCE = "interference"


@dataclass(frozen=True)
class Key:
    """Which measurement it is. Only one is kept for each key."""

    kind: Kind
    system: str
    load: str
    round: int
    rate: float | None = None
    """Requests a second; of probes alone."""
    limit_factor: float | None = None
    """Of a probe: its limits over the better engine's idle medians."""


class Store:
    """A file of measurements. Each is written at once, and found again by its key.

    Args:
        path: of the file, which has the measurements of all processors.
        processor: the one whose measurements are seen and added.
    """

    def __init__(self, path: Path, processor: str) -> None:
        self._path = path
        self.processor = processor
        self._figures: dict[Key, Figures] = {}
        for entry in map(json.loads, self._lines()):
            if entry["processor"] == processor:
                key = Key(**{**entry["key"], "kind": Kind(entry["key"]["kind"])})
                self._figures[key] = entry["figures"]

    def clear(self) -> None:
        """Forget this processor's measurements, in the file as well."""
        self._figures.clear()
        others = [one for one in self._lines() if json.loads(one)["processor"] != self.processor]
        if self._path.exists():
            self._path.write_text("".join(f"{line}\n" for line in others), encoding="utf-8")

    def find(self, key: Key) -> Figures | None:
        """The figures that were measured for the key, if they were."""
        return self._figures.get(key)

    def add(self, key: Key, figures: Figures) -> None:
        """Keep the figures, in the file as well."""
        self._figures[key] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            entry = {"processor": self.processor, "key": asdict(key), "figures": figures}
            file.write(json.dumps(entry) + "\n")

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []

    def of(self, kind: Kind) -> Iterator[tuple[Key, Figures]]:
        """All measurements of a kind, in the order in which they were made."""
        return ((key, figures) for key, figures in self._figures.items() if key.kind == kind)

    def rounds(self, kind: Kind, system: str, load: str) -> dict[int, Figures]:
        """The figures of a system under a load, by round."""
        return {
            key.round: figures
            for key, figures in self.of(kind)
            if (key.system, key.load) == (system, load)
        }
