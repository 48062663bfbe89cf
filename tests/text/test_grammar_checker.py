"""Grammars that would end the process that compiles them are refused, and nothing else happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvrelay.text.grammar import GrammarError
from kvrelay.text.grammar_checker import CheckerError, GrammarChecker
from kvrelay.wire.request import StructuredOutput

CHAIN = "start: r0\n" + "".join(f"r{i}:{{}}r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
"""So deep that llguidance overflows the stack of an ordinary thread."""
MULTIPLES = json.dumps({"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 97)]})
PLACE = {"properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(150)}}
PLACE["properties"]["z"] = {"uniqueItems": True}  # type: ignore[dict-item]
PLACE["$defs"] = {"d": {"properties": {f"p{i}": {} for i in range(2000)}}}  # type: ignore[dict-item]


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(["<end>"])
    yield made
    made.close()
    made.reap()


def test_a_deep_grammar_ends_no_process_but_its_own(checker: GrammarChecker) -> None:
    checker.check(StructuredOutput(grammar=CHAIN.replace("{}", "")))
    checker.check(StructuredOutput(regex="a"))


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(json_schema=MULTIPLES),
        StructuredOutput(
            grammar="start: R0\n"
            + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40))
            + 'R40: "a"'
        ),
    ],
    ids=["multiples", "terminals"],
)
def test_what_takes_too_much_is_refused(checker: GrammarChecker, wanted: StructuredOutput) -> None:
    """Of CPU time or of memory, whichever ends first."""
    with pytest.raises(GrammarError, match=r"takes too (long|much memory) to compile|too big|fuel"):
        checker.check(wanted)
    checker.check(StructuredOutput(regex="a"))


def test_the_search_for_a_place_is_a_part_of_the_check(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        checker.check(StructuredOutput(json_schema=json.dumps(PLACE)))


def test_a_process_that_was_killed_is_started_again(checker: GrammarChecker) -> None:
    checker.check(StructuredOutput(regex="a"))
    pid = checker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    checker.check(StructuredOutput(regex="b"))
    assert checker.pid not in (None, pid)


def test_it_starts_nothing_once_it_is_closed(checker: GrammarChecker) -> None:
    checker.close()
    with pytest.raises(CheckerError):
        checker.check(StructuredOutput(regex="a"))


PARENT = """
import sys
from kvrelay.text.grammar_checker import GrammarChecker
from kvrelay.wire.request import StructuredOutput
checker = GrammarChecker([])
checker.check(StructuredOutput(regex="a"))
print(checker.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        ended = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        poll = select.poll()
        poll.register(ended)
        assert poll.poll(30_000)
    finally:
        os.close(ended)
