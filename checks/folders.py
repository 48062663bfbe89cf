"""A folder is read at a glance, and a small file has a reason to be one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from checks.sources import Source

MAX_FILES = 25
"""Python files of one folder, its sub-folders' files not counted."""

MIN_LINES = 60
"""A shorter file has two importers, or moves in with its one."""

FAMILIES = ("deploy/commands", "text/output_parsers", "cpu_kernels")
"""Folders with a file a member: a command, a format, a kernel. A member may be short."""

_ENTRY = "the entry of a role, loaded by its name"
EXCEPTIONS = {
    "engine/scheduler/build_step.py": "its importer would have over 500 lines",
    "engine/worker/device_defaults.py": "values to tune, beside no mechanism",
    "prefill_worker/worker.py": _ENTRY,
    "decode_worker/worker.py": _ENTRY,
    "aggregated_worker/worker.py": _ENTRY,
    "model_runner/layers/elementwise_choice.py": "a choice beside all that it chooses among",
    "model_runner/layers/rotary_embedding.py": "a layer, as its neighbours are",
    "model_runner/checkpoint/kv_scales.py": "a kind of tensors, as its neighbours read others",
    "deploy/cli.py": "the program's entry, which the package's metadata and its commands name",
}
"""Short files with one importer that stay, each with its reason."""


def check(sources: list[Source]) -> Iterator[str]:
    """Yield a line for each folder with too many files, and each small file that should move in."""
    for folder, count in sorted(Counter(source.folder for source in sources).items()):
        if count > MAX_FILES:
            yield f"{folder}/: {count} Python files, {MAX_FILES} at most: make rooms inside"
    importers = find_importers(sources)
    small = {source.path for source in sources if is_small(source)}
    for path in sorted(small - EXCEPTIONS.keys()):
        (users, *others) = [*sorted(importers[path]), ""]
        if users and not any(others):
            yield f"{path}: under {MIN_LINES} lines, imported by {users} alone: move it in there"
    folders = {source.folder for source in sources}
    for path in sorted(EXCEPTIONS.keys() - small):
        if path.rpartition("/")[0] in folders:
            yield f"{path}: it is no small file of today: take it off the exceptions"


def is_small(source: Source) -> bool:
    """Tell whether a file is short, and no member of a family or a package's own."""
    in_family = source.path.startswith(tuple(f"{family}/" for family in FAMILIES))
    return not in_family and source.name[:2] != "__" and source.text.count("\n") < MIN_LINES


def find_importers(sources: list[Source]) -> dict[str, set[str]]:
    """Find the product's files that import each file, by path."""
    by_module = {source.module: source.path for source in sources}
    importers: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for name in source.imported & by_module.keys():
            importers[by_module[name]].add(source.path)
    return importers
