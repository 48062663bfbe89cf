"""The kinds of models as Markdown: who computes them, and what was found of each."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from kvrelay.model_runner.checkpoint.architectures import ARCHITECTURES

RESULTS: Final = Path(__file__).resolve().parents[1] / "models.json"
_ATTENTION: Final = {"kernels": "our kernels", "gathered": "plain torch"}


def served() -> str:
    """The kinds that are served."""
    lines = ["| kind | architecture | `auto` takes | pools | attention by transformers' code |"]
    lines.append("| --- | --- | --- | --- | --- |")
    native = set(ARCHITECTURES)
    for row in _rows():
        if row["refusal"]:
            continue
        code = "native" if row["architecture"] in native else "transformers"
        pools, attention = ", ".join(row["pools"]), _ATTENTION[row["attention"]]
        lines.append(
            f"| {row['kind']} | `{row['architecture']}` | {code} | {pools} | {attention} |"
        )
    return "\n".join(lines)


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
