"""Docstrings, those below fields included, are English that a reader follows at once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise

from checks.sources import Source

HEADLESS = frozenset({"Of", "That", "Those", "As", "What"})
"""A docstring that begins so has no subject."""

MAX_WORDS = 25
"""The longest sentence."""

THIRD_PERSON = frozenset(
    [
        "Adds",
        "Admits",
        "Allows",
        "Announces",
        "Answers",
        "Appends",
        "Asks",
        "Attaches",
        "Becomes",
        "Begins",
        "Brings",
        "Builds",
        "Calls",
        "Cancels",
        "Captures",
        "Carries",
        "Changes",
        "Checks",
        "Chooses",
        "Collects",
        "Compiles",
        "Completes",
        "Computes",
        "Connects",
        "Continues",
        "Converts",
        "Copies",
        "Counts",
        "Decides",
        "Declares",
        "Decodes",
        "Describes",
        "Differs",
        "Divides",
        "Does",
        "Drains",
        "Draws",
        "Drives",
        "Drops",
        "Edits",
        "Ends",
        "Estimates",
        "Examines",
        "Executes",
        "Exports",
        "Fails",
        "Fills",
        "Finds",
        "Fits",
        "Follows",
        "Forgets",
        "Forks",
        "Gathers",
        "Generates",
        "Gives",
        "Goes",
        "Grants",
        "Guesses",
        "Has",
        "Hears",
        "Holds",
        "Implements",
        "Imports",
        "Is",
        "Joins",
        "Keeps",
        "Knows",
        "Launches",
        "Lays",
        "Leads",
        "Learns",
        "Leaves",
        "Lends",
        "Lets",
        "Listens",
        "Loads",
        "Logs",
        "Looks",
        "Makes",
        "Maps",
        "Marks",
        "Measures",
        "Moves",
        "Notes",
        "Offers",
        "Opens",
        "Passes",
        "Pins",
        "Places",
        "Posts",
        "Prints",
        "Publishes",
        "Puts",
        "Raises",
        "Reads",
        "Receives",
        "Records",
        "Refuses",
        "Removes",
        "Replaces",
        "Reports",
        "Retries",
        "Returns",
        "Runs",
        "Says",
        "Schedules",
        "Sends",
        "Serves",
        "Shows",
        "Stands",
        "Starts",
        "Stores",
        "Submits",
        "Takes",
        "Tells",
        "Times",
        "Tokenizes",
        "Tries",
        "Trims",
        "Turns",
        "Waits",
        "Wakes",
        "Weighs",
        "Widens",
        "Wraps",
        "Writes",
        "Yields",
    ]
)
"""Verbs that tell what something does, where a docstring says what to expect of it."""

_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\d\"'(])")
_PARTS = re.compile(r"\n\s*\n|\n\s*(?=[-*|] )|\n(?=\s*[\w`., ]{1,40}: )|:\n")


def check(sources: list[Source]) -> Iterator[str]:
    """Yield a line for each docstring that breaks a rule."""
    for source in sources:
        for line, kind, text in find_docstrings(source.tree):
            for fault in find_faults(kind, text):
                yield f"{source.path}:{line}: {fault}"


def find_docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (``module``, ``class``, ``function``, ``field``) and text of each."""
    kinds = {
        ast.Module: "module",
        ast.ClassDef: "class",
        ast.FunctionDef: "function",
        ast.AsyncFunctionDef: "function",
    }
    for node in ast.walk(tree):
        kind = kinds.get(type(node))
        if kind is None:
            continue
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
        if text:
            yield body[0].lineno, kind, text
        if kind in {"module", "class"}:
            for field, below in pairwise(body):
                if isinstance(field, ast.Assign | ast.AnnAssign) and (words := _string(below)):
                    yield below.lineno, "field", words


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else None
    return None


def find_faults(kind: str, text: str) -> Iterator[str]:
    """Yield what is wrong with one docstring."""
    match = re.match(r"[\"'(]*([A-Za-z]+)(?=[\s.,;:]|$)", text)
    first = match.group(1) if match else ""
    if first in HEADLESS:
        yield f"a {kind}'s docstring begins with {first!r}: begin with a noun or an imperative"
    if first in THIRD_PERSON:
        yield f"a {kind}'s docstring begins with {first!r}: write an imperative or a noun"
    for sentence in split_sentences(text):
        words = len(sentence.split())
        if words > MAX_WORDS:
            yield f"a sentence of {words} words, {MAX_WORDS} at most: {sentence[:60]}..."


def split_sentences(text: str) -> Iterator[str]:
    """Split into sentences; an empty line, a list's entry and a field's name end one, too."""
    without_code = re.sub(r"::\n\n(?:[ \t]+.*\n?|\n)+", ".\n\n", text)
    for part in _PARTS.split(without_code):
        yield from _SENTENCE_ENDS.split(" ".join(part.split()))
