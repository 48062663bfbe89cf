"""Requests join the engine when their grammars are compiled: the forward thread waits for none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from kvrelay.engine.scheduler.commands import Cancel, Command, Mailbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.request import RequestKey, StructuredOutput

Prepare: TypeAlias = Callable[[StructuredOutput], Future[Any] | None]
"""Begins to compile a grammar; None: nobody does."""


class HeldSubmits:
    """Posts submissions and cancellations, each request's in order. Call it on the event loop.

    What it holds is bounded: by the requests that a router may have, and by what their grammars
    may take to compile, one after the other.

    Args:
        inbox: the engine's.
        prepare: what compiles grammars.
    """

    def __init__(self, inbox: Mailbox[Command], prepare: Prepare) -> None:
        self._inbox = inbox
        self._prepare = prepare
        self._held: dict[RequestKey, list[Submit | Cancel]] = {}

    def submit(self, command: Submit) -> None:
        """Post a submission once its grammar is compiled, or cannot be: the engine tells why."""
        wanted = command.sampling.structured_output
        compiled = self._prepare(wanted) if wanted is not None else None
        if compiled is None or compiled.done():
            self._inbox.post(command)
            return
        key = command.key.of_choice(0)
        self._held.setdefault(key, []).append(command)
        loop = asyncio.get_running_loop()

        def ready(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release, key)

        compiled.add_done_callback(ready)

    def cancel(self, command: Cancel) -> None:
        """Post a cancellation, behind its request's submission."""
        held = self._held.get(command.key.of_choice(0))
        if held is None:
            self._inbox.post(command)
        else:
            held.append(command)

    def forget(self, link: RouterLink) -> None:
        """Post nothing of a stream that has ended."""
        for key, held in list(self._held.items()):
            if isinstance(held[0], Submit) and held[0].link is link:
                del self._held[key]

    def _release(self, key: RequestKey) -> None:
        for command in self._held.pop(key, ()):
            self._inbox.post(command)
