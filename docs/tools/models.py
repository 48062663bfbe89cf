"""The kinds of models as Markdown: who computes them, and what was found of each."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from docs.tools import model_modes
from kvrelay.model_runner.checkpoint.architectures import ARCHITECTURES

RESULTS: Final = Path(__file__).resolve().parents[1] / "models.json"
_ATTENTION: Final = {"kernels": "our kernels", "gathered": "plain torch"}
_EXPERTS: Final = {"": "none", "own": "ours", "theirs": "transformers'"}
_HEADER: Final = ("kind", "architecture", "`auto` takes", "pools")
_BY_TRANSFORMERS: Final = ("attention", "experts")


def served() -> str:
    """The kinds that are served."""
    header = (*_HEADER, *(f"{one} by transformers' code" for one in _BY_TRANSFORMERS))
    rows: list[tuple[str, ...]] = [header, ("---",) * len(header)]
    for row in _rows():
        if row["refusal"]:
            continue
        code = "native" if row["architecture"] in ARCHITECTURES else "transformers"
        rows.append(
            (
                row["kind"],
                f"`{row['architecture']}`",
                code,
                ", ".join(row["pools"]),
                _ATTENTION[row["attention"]],
                _EXPERTS[row["experts"]],
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def modes() -> str:
    """The modes of the architectures that our code computes."""
    return model_modes.table({row["kind"]: row["architecture"] for row in _rows()})


def refused() -> str:
    """The kinds that are refused, by their reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in _rows():
        if row["refusal"]:
            by_reason[_reason(row["refusal"])].append(row["kind"])
    lines = ["| reason | kinds |", "| --- | --- |"]
    lines += [f"| {one} | {', '.join(kinds)} |" for one, kinds in sorted(by_reason.items())]
    return "\n".join(lines)


def _reason(refusal: str) -> str:
    """A reason without what is one model's alone."""
    if refusal.startswith("it keeps a state ("):
        return "it keeps a state"
    if " failed: " in refusal:
        return "its code does not run with what it is given"
    return refusal.partition(":")[0]


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return rows
