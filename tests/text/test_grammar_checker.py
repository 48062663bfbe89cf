"""Grammars that would end the process that compiles them are refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from llguidance import LLTokenizer

from kvrelay.text import grammar_checker, grammar_process
from kvrelay.text.grammar import LEAST_BYTES, GrammarCompiler, GrammarError
from kvrelay.text.grammar_checker import CheckerError, GrammarChecker
from kvrelay.wire.submit import StructuredOutput
from tests.checkpoints import make_tokenizer

VOCABULARY = make_tokenizer().to_str()
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
"""So deep that llguidance overflows the stack of an ordinary thread."""
MULTIPLES = json.dumps({"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 97)]})
SLOW = 'root ::= "a"\n' + "# x\n" * 800_000
"""Far longer than any that a router passes on."""
PLACE = {"properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(150)}}
PLACE["properties"]["z"] = {"uniqueItems": True}  # type: ignore[dict-item]
PLACE["$defs"] = {"d": {"properties": {f"p{i}": {} for i in range(2000)}}}  # type: ignore[dict-item]


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(VOCABULARY)
    yield made
    made.close()
    made.reap()


def test_a_deep_grammar_passes(checker: GrammarChecker) -> None:
    checker.check(StructuredOutput(regex="a"))
    pid = checker.pid
    checker.check(StructuredOutput(grammar=CHAIN))
    assert checker.pid == pid


def test_what_takes_too_much_memory_is_refused(checker: GrammarChecker) -> None:
    wanted = StructuredOutput(json_schema=MULTIPLES)
    assert_ends_the_process(checker, wanted, "takes too much memory to compile")


def test_what_takes_too_much_time_is_refused(checker: GrammarChecker) -> None:
    assert_ends_the_process(checker, StructuredOutput(grammar=SLOW), "takes too long to compile")


def assert_ends_the_process(
    checker: GrammarChecker, wanted: StructuredOutput, problem: str
) -> None:
    """The grammar is refused; the next one is checked by another process."""
    checker.check(StructuredOutput(regex="a"))
    pid = checker.pid
    with pytest.raises(GrammarError, match=f"^{problem}$"):
        checker.check(wanted)
    checker.check(StructuredOutput(regex="a"))
    assert checker.pid not in (None, pid)


@pytest.mark.parametrize("text", ["%json" * 13_000, "start: " + "%json" * 13_000])
def test_schemas_within_a_grammar_are_looked_at_in_no_time(
    checker: GrammarChecker, text: str
) -> None:
    """To look for all in all of the text, once for each, took more than the bound."""
    with pytest.raises(GrammarError, match=r"no JSON schema|convert the grammar"):
        checker.check(StructuredOutput(grammar=text))


BOMB = "(a{1000}){1000}"
DEEP = {"type": "string", "pattern": f"^[a-f]{{3}}{BOMB}$"}
DOUBLED = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(20))
"""A text of a million letters."""
BOMBS = [
    StructuredOutput(regex=BOMB),
    StructuredOutput(regex="((a{100}){100}){100}"),
    StructuredOutput(regex="(ab{1000}){1000}"),
    StructuredOutput(regex=f"b?{BOMB}"),
    StructuredOutput(regex=f"[a-z]{{20}}{BOMB}"),
    StructuredOutput(regex=f"(foo|bar{BOMB})"),
    StructuredOutput(json_schema=json.dumps({"type": "string", "pattern": f"^{BOMB}$"})),
    StructuredOutput(
        json_schema=json.dumps(
            {
                "type": "array",
                "items": {"type": "string", "pattern": f"^[a-f]{{3}}{BOMB}$"},
                "minItems": 1,
            }
        )
    ),
    StructuredOutput(grammar=f"start: A\nA: /{BOMB}/"),
    StructuredOutput(grammar=f'start: "x" | "y" A\nA: /{BOMB}/'),
    StructuredOutput(
        grammar="start: r0\n"
        + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(20))
        + 'r20: "a"'
    ),
]
SLOW_MASKS = [
    StructuredOutput(regex="x" * 95_000),
    StructuredOutput(regex="x{60}(a{280}){330}([ab]{0,40}c){20}"),
]
"""Each of their masks takes about twice as long as the walks allow, by the processor's clock."""
HEAVY = [
    StructuredOutput(regex=r"([a-z]{1,100} ){1,100}"),
    StructuredOutput(regex="x" * 10_000),
    StructuredOutput(json_schema='{"type": "string", "maxLength": 20000}'),
    StructuredOutput(choice=tuple(f"the choice with number {number}" for number in range(1500))),
    StructuredOutput(
        json_schema=json.dumps({"enum": [f"value {number}" for number in range(3000)]})
    ),
]


def test_what_a_worker_could_not_follow_is_refused_and_heavy_grammars_are_not(
    checker: GrammarChecker,
) -> None:
    """Compiled in no time, they would stall a worker at a mask, the first one or a later one."""
    checker.check(StructuredOutput(regex="a"))
    pid = checker.pid
    for wanted in BOMBS:
        with pytest.raises(GrammarError, match="too much work"):
            checker.check(wanted)
    for wanted in HEAVY:
        checker.check(wanted)
    assert checker.pid == pid


@pytest.mark.slow  # a faster processor may allow them
@pytest.mark.parametrize("wanted", SLOW_MASKS, ids=["long", "repeated"])
def test_slow_masks_are_refused(checker: GrammarChecker, wanted: StructuredOutput) -> None:
    with pytest.raises(GrammarError, match="too much work"):
        checker.check(wanted)


@pytest.mark.parametrize(("seconds", "is_refused"), [(0.012, True), (0.009, False)])
def test_masks_may_take_so_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_refused: bool
) -> None:
    """Count time by masks: no processor takes the same for one twice."""
    compiler = GrammarCompiler(lambda: LLTokenizer(VOCABULARY))
    walks, clock = grammar_process._Walks(compiler.tokenizer), itertools.count(step=seconds)
    matcher = compiler.compile(StructuredOutput(regex="[a-z]{200}"))
    monkeypatch.setattr(grammar_process, "time", SimpleNamespace(process_time=clock.__next__))
    expected = pytest.raises(GrammarError, match="too much work") if is_refused else nullcontext()
    with expected:
        walks.check(matcher)


def test_a_tokenizer_without_a_known_decoder_is_fit_for_no_grammar() -> None:
    described = {**json.loads(VOCABULARY), "decoder": None}
    checker = GrammarChecker(json.dumps(described))
    for _ in range(2):
        with pytest.raises(GrammarError, match="the tokenizer is not fit"):
            checker.check(StructuredOutput(regex="a"))
        assert checker.pid is None


def test_a_check_tells_what_the_grammar_takes(checker: GrammarChecker) -> None:
    members = {f"member{number}": {"type": "string", "maxLength": number} for number in range(900)}
    large = StructuredOutput(json_schema=json.dumps({"properties": members}))
    assert checker.check(StructuredOutput(regex="a")) == LEAST_BYTES
    sizes = [checker.check(large) for _ in range(3)]
    assert min(sizes) > 1 << 20
    assert max(sizes) < 1.1 * min(sizes) < 32 << 20


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_grammar_is_refused_because_the_process_was_killed(
    checker: GrammarChecker, number: signal.Signals
) -> None:
    """It may still take the grammar, or have ended: that is a race."""
    for _ in range(3):
        checker.check(StructuredOutput(regex="a"))
        assert checker.pid is not None
        os.kill(checker.pid, number)
        with contextlib.suppress(CheckerError):
            checker.check(StructuredOutput(regex="b"))


def test_a_process_that_does_not_run_refuses_no_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(StructuredOutput(regex="a"))
    assert checker.pid is not None
    os.kill(checker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, checker.pid, os.WSTOPPED | os.WNOWAIT)  # it has, a moment later
    with monkeypatch.context() as patched:
        patched.setattr(grammar_checker, "_CHECK_SECONDS", 0.1)
        with pytest.raises(CheckerError, match="by the clock"):
            checker.check(StructuredOutput(regex="b"))
    checker.check(StructuredOutput(regex="b"))


def test_answers_that_were_not_read_are_no_other_grammars(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(line: object) -> object:
        raise ValueError("no JSON")

    checker.check(StructuredOutput(regex="a"))
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", broken)
        with pytest.raises(ValueError, match="no JSON"):
            checker.check(StructuredOutput(regex="("))
    checker.check(StructuredOutput(regex="b"))
    with pytest.raises(GrammarError, match="unclosed group"):
        checker.check(StructuredOutput(regex="("))


def test_it_starts_nothing_once_it_is_closed(checker: GrammarChecker) -> None:
    checker.close()
    with pytest.raises(CheckerError):
        checker.check(StructuredOutput(regex="a"))


PARENT = """
import sys
from kvrelay.text.grammar_checker import GrammarChecker
from kvrelay.wire.submit import StructuredOutput
checker = GrammarChecker(sys.stdin.readline())
checker.check(StructuredOutput(regex="a"))
print(checker.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps(json.loads(VOCABULARY)).encode() + b"\n")
        parent.stdin.flush()
        ended = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        poll = select.poll()
        poll.register(ended)
        assert poll.poll(30_000)
    finally:
        os.close(ended)
