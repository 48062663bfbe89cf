"""The queue of grammars to check: callers take turns, and abandoned checks are dropped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from kvrelay.router.errors import GrammarQueueFull, Unavailable
from kvrelay.text.grammar import GrammarError
from kvrelay.text.grammar_checker import CheckerError, GrammarChecker
from kvrelay.wire.submit import StructuredOutput

logger = logging.getLogger(__name__)

MOST_OF_A_CALLER: Final = 64
_MOST: Final = 256
"""The most grammars that wait, of one caller and of all."""
_MOST_KNOWN: Final = 4096
"""The most grammars whose verdict is kept."""


Verdict: TypeAlias = GrammarError | int
"""The reason why a grammar cannot be compiled, or the bytes that it takes."""


class _Check:
    """A grammar that is to be checked, for all who wait for it."""

    def __init__(self, wanted: StructuredOutput, key: bytes) -> None:
        self.wanted = wanted
        self.key = key
        self.num_waiting = 0
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()


class GrammarChecks:
    """A queue that checks one grammar at a time, the callers' in turn. Call it on one event loop.

    Args:
        checker: finds out whether a grammar can be compiled.
        retry_after_ms: when a client that is refused should try again.
        on_checked: called with the seconds of each check.
        on_known: called when a verdict was known, or its check was already open.
    """

    def __init__(
        self,
        checker: GrammarChecker,
        retry_after_ms: int,
        on_checked: Callable[[float], object],
        on_known: Callable[[], object],
    ) -> None:
        self._checker = checker
        self._retry_after_ms = retry_after_ms
        self._on_checked = on_checked
        self._on_known = on_known
        self._thread = ThreadPoolExecutor(1, "kvrelay-grammar")
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._open: dict[bytes, _Check] = {}
        self._waiting: OrderedDict[str, deque[_Check]] = OrderedDict()  # by caller
        self._runner: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Grammars whose check has not begun."""
        return sum(len(own) for own in self._waiting.values())

    async def check(self, wanted: StructuredOutput, key: bytes, caller: str) -> int:
        """Return the bytes of the compiled grammar. A check that nobody waits for never begins.

        Args:
            wanted: the structured output with the grammar.
            key: a key that only equal grammars share.
            caller: the caller in whose turn it is checked.

        Raises:
            GrammarError: it cannot be compiled.
            GrammarQueueFull: too many wait.
            Unavailable: the check itself failed; another one may succeed.
        """
        if key in self._known:
            self._known.move_to_end(key)
            self._on_known()
            verdict = self._known[key]
        else:
            verdict = await self._wait(self._join(wanted, key, caller))
        if isinstance(verdict, GrammarError):
            raise GrammarError(str(verdict), verdict.place)
        return verdict

    def close(self) -> None:
        """Stop all checks."""
        if self._runner is not None:
            self._runner.cancel()
        self._checker.close()
        self._thread.submit(self._checker.reap)
        self._thread.shutdown()
        for check in self._open.values():
            check.verdict.cancel()

    def _join(self, wanted: StructuredOutput, key: bytes, caller: str) -> _Check:
        if key in self._open:
            self._on_known()
            return self._open[key]
        own = len(self._waiting.get(caller, ()))
        if own >= MOST_OF_A_CALLER or self.num_waiting >= _MOST:
            raise GrammarQueueFull(self.num_waiting, self._retry_after_ms)
        check = self._open[key] = _Check(wanted, key)
        self._waiting.setdefault(caller, deque()).append(check)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return check

    async def _wait(self, check: _Check) -> Verdict:
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.verdict)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and not check.verdict.done():
                self._drop(check)

    def _drop(self, check: _Check) -> None:
        """Remove a check that nobody waits for, unless it runs."""
        for caller, own in self._waiting.items():
            if check in own:
                own.remove(check)
                if not own:
                    del self._waiting[caller]
                del self._open[check.key]
                return

    def _next(self) -> _Check:
        """Take the oldest check of the caller whose turn it is; this caller is next served last."""
        caller, own = self._waiting.popitem(last=False)
        check = own.popleft()
        if own:
            self._waiting[caller] = own
        return check

    async def _run(self) -> None:
        """Run the waiting checks, and end."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                check = self._next()
                begun = time.monotonic()
                try:
                    verdict: Verdict = await loop.run_in_executor(
                        self._thread, self._checker.check, check.wanted
                    )
                except GrammarError as error:
                    verdict = error
                except Exception as error:
                    if not isinstance(error, CheckerError):
                        logger.exception("a grammar could not be checked")
                    self._fail(check, error)
                    continue
                self._on_checked(time.monotonic() - begun)
                self._settle(check, verdict)
        finally:
            self._runner = None

    def _fail(self, check: _Check, error: Exception) -> None:
        del self._open[check.key]
        if check.num_waiting and not check.verdict.done():
            check.verdict.set_exception(Unavailable(str(error), self._retry_after_ms))

    def _settle(self, check: _Check, verdict: Verdict) -> None:
        del self._open[check.key]
        self._known[check.key] = verdict
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        if not check.verdict.done():
            check.verdict.set_result(verdict)
