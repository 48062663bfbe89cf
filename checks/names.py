"""One public name of a class or a file stands for one thing in the whole house."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from checks.sources import Source

FILES_OF_ROLES = frozenset({"scheduler", "worker", "request", "hand_overs"})
"""Files that the roles have in parallel, and the engine for all of them."""

FILES_OF_THE_GROUND = frozenset({"errors", "config", "metrics", "__init__", "__main__"})
"""Files that any room may have for itself."""

ROLES = ("prefill_worker", "decode_worker", "aggregated_worker")
"""Rooms whose classes may have the same name where they do the same for another role."""

EXCEPTIONS = {
    "router": "`commands/router.py` has the name of its command, as all of `commands/` do",
}
"""File names that stand for two things, each with its reason."""


def check(sources: list[Source]) -> Iterator[str]:
    """Yield a line for each public class or file whose name stands twice."""
    files, classes = defaultdict(list), defaultdict(list)
    for source in sources:
        files[source.name].append(source.path)
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(source.path)
    for name, paths in sorted(files.items()):
        if len(paths) > 1 and name not in FILES_OF_ROLES | FILES_OF_THE_GROUND | EXCEPTIONS.keys():
            yield f"{paths[0]}: another file has this name: {', '.join(paths[1:])}"
    for name, paths in sorted(classes.items()):
        if len(paths) > 1 and not _are_roles(paths):
            yield f"{paths[0]}: another class {name} is in {', '.join(paths[1:])}"


def _are_roles(paths: list[str]) -> bool:
    rooms = [path.partition("/")[0] for path in paths]
    return set(rooms) <= set(ROLES) and len(set(rooms)) == len(rooms)
