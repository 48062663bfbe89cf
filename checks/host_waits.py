"""No forward waits for the device: the host decides nothing by what a kernel has computed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checks.sources import Source

FOLDERS = ("model_runner/layers", "model_runner/attention", "model_runner/graphs")
"""Folders of what a forward runs."""

WAITING = frozenset({"tolist", "item", "cpu", "nonzero"})
"""Methods, and torch's functions, that bring a tensor's contents to the host.

`torch.unique`, and `torch.where` with one argument, do so too: contents decide their size.
"""

EXCEPTIONS = {
    "model_runner/layers/experts/sliced_experts.py": "the host chooses which experts run",
    "model_runner/attention/cpu_attention.py": "a CPU's attention, whose tensors are the host's",
}
"""Files that may wait, each with its reason."""


def check(sources: list[Source]) -> Iterator[str]:
    """Yield a line for each call that waits, and each exception that is none any more."""
    waiting = set()
    for source in sources:
        if not source.path.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
            continue
        for line, name in find_waits(source.tree):
            waiting.add(source.path)
            if source.path not in EXCEPTIONS:
                yield f"{source.path}:{line}: {name} makes the host wait for the device"
    paths = {source.path for source in sources}
    for path in sorted(EXCEPTIONS.keys() & paths - waiting):
        yield f"{path}: it waits nowhere: take it off the exceptions"


def find_waits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find the calls that wait. Numpy's arrays are the host's: its own functions may be called."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, attribute = ast.unparse(node.func), node.func.attr
        if name.startswith("np."):
            continue
        has_one_argument = len(node.args) + len(node.keywords) == 1
        if (
            attribute in WAITING
            or name == "torch.unique"
            or (name == "torch.where" and has_one_argument)
        ):
            yield node.lineno, f"{attribute}()"
