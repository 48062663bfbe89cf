"""Grammars wait in turn, within bounds, and only while somebody waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from kvrelay.router.admission import grammar_checks
from kvrelay.router.admission.grammar_checks import GrammarChecks
from kvrelay.router.errors import GrammarQueueFull, Unavailable
from kvrelay.text.grammar_checker import CheckerError, GrammarChecker
from kvrelay.wire.submit import StructuredOutput
from tests.checkpoints import make_tokenizer


class HeldChecker(GrammarChecker):
    """Begins no check before it is let go."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer().to_str())
        self.go = threading.Event()
        self.checked: list[str] = []
        self.errors: list[Exception] = []
        """What the next checks raise."""

    def check(self, constraint: object) -> int:
        assert self.go.wait(60)
        assert isinstance(constraint, StructuredOutput)
        self.checked.append(constraint.regex or "")
        if self.errors:
            raise self.errors.pop()
        return super().check(constraint)


@pytest.fixture
def checker() -> HeldChecker:
    return HeldChecker()


@pytest.fixture
async def ask(checker: HeldChecker) -> AsyncIterator[Callable[[str, str], asyncio.Task[int]]]:
    checks = GrammarChecks(checker, 1000, lambda _: None, lambda: None)

    def begin(regex: str, caller: str) -> asyncio.Task[int]:
        wanted = StructuredOutput(regex=regex)
        return asyncio.create_task(checks.check(wanted, regex.encode(), caller))

    yield begin
    checker.go.set()
    checks.close()


Ask = Callable[[str, str], "asyncio.Task[int]"]


async def test_callers_are_served_in_turn(checker: HeldChecker, ask: Ask) -> None:
    tasks = [ask(regex, "many") for regex in "abcd"] + [ask("x", "few")]
    await asyncio.sleep(0)
    checker.go.set()
    await asyncio.gather(*tasks)
    assert checker.checked.index("x") <= 2


async def test_what_nobody_waits_for_is_not_checked(checker: HeldChecker, ask: Ask) -> None:
    first, left, stays, joins = ask("a", ""), ask("b", ""), ask("c", ""), ask("c", "other")
    for _ in range(3):
        await asyncio.sleep(0)
    left.cancel()
    stays.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    checker.go.set()
    await asyncio.gather(first, joins)
    assert checker.checked == ["a", "c"]


async def test_no_more_wait_than_may(
    checker: HeldChecker, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_OF_A_CALLER", 2)
    monkeypatch.setattr(grammar_checks, "_MOST", 3)
    begun = ask("a", "one")
    for _ in range(3):
        await asyncio.sleep(0)
    waiting = [ask("b", "one"), ask("c", "one")]
    with pytest.raises(GrammarQueueFull):
        await ask("d", "one")
    waiting.append(ask("e", "two"))
    with pytest.raises(GrammarQueueFull):
        await ask("f", "two")
    checker.go.set()
    await asyncio.gather(begun, *waiting)


async def test_a_verdict_is_kept(checker: HeldChecker, ask: Ask) -> None:
    checker.go.set()
    for _ in range(2):
        with pytest.raises(Exception, match="unclosed group"):
            await ask("(", "")
    assert checker.checked == ["("]


@pytest.mark.parametrize("error", [CheckerError("ended"), KeyError("unexpected")], ids=repr)
async def test_what_could_not_be_checked_is_checked_when_it_comes_again(
    checker: HeldChecker, ask: Ask, error: Exception
) -> None:
    checker.go.set()
    checker.errors.append(error)
    asked = ask("a", ""), ask("b", "")
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asked[0], 60)
    await asked[1]
    await ask("a", "")
    assert checker.checked == ["a", "b", "a"]
