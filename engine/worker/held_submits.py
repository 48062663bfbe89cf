"""Requests join the engine when their grammars are compiled: the forward thread waits for none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

from kvrelay.engine.scheduler.commands import Command, Mailbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput
from kvrelay.wire.submit import CancelRequest, RequestKey, StructuredOutput

Prepare: TypeAlias = Callable[[StructuredOutput], Future[Any] | None]
"""Begins to compile a grammar for whoever holds the future; None: nobody does."""


class HeldSubmits:
    """Posts submissions, those with a grammar later. Call it on the event loop.

    What it holds is bounded by the requests that a router may have. Their grammars are compiled
    one after the other, and not at all once nobody waits for them.

    Args:
        inbox: the engine's.
        prepare: what compiles grammars.
    """

    def __init__(self, inbox: Mailbox[Command], prepare: Prepare) -> None:
        self._inbox = inbox
        self._prepare = prepare
        self._held: dict[RequestKey, Submit] = {}
        self._draining = False

    def submit(self, command: Submit) -> None:
        """Post a submission once its grammar is compiled, or cannot be: the engine tells why."""
        sampling = command.submission.sampling_params.sampling
        wanted = None if self._draining else sampling.structured_output
        compiled = self._prepare(wanted) if wanted is not None else None
        if compiled is None:
            self._inbox.post(command)
            return
        command = replace(command, grammar=compiled)
        if compiled.done():
            self._inbox.post(command)
            return
        key = command.key.of_choice(0)
        self._held[key] = command
        loop = asyncio.get_running_loop()

        def ready(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release, key)

        compiled.add_done_callback(ready)

    def cancel(self, command: CancelRequest) -> None:
        """Post a cancellation; a submission that is held ends here instead."""
        held = self._held.pop(command.key.of_choice(0), None)
        if held is None:
            self._inbox.post(command)
            return
        _end(held, EndReason.ABORTED)

    def drain(self) -> None:
        """Retract what is held: routers submit it to other workers.

        Nothing is held from now on: the engine, which drains, retracts what still comes.
        """
        self._draining = True
        held, self._held = self._held, {}
        for command in held.values():
            _end(command, EndReason.RETRACTED)

    def forget(self, link: RouterLink) -> None:
        """Post nothing of a stream that has ended."""
        for key, held in list(self._held.items()):
            if held.link is link:
                del self._held[key]

    def _release(self, key: RequestKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._inbox.post(held)


def _end(held: Submit, reason: EndReason) -> None:
    """Tell the router that a submission that the engine has not seen has ended."""
    submission, end = held.submission, RequestEnd(reason)
    held.link.deliver(
        EngineOutputs(
            tuple(
                RequestOutput(held.key.of_choice(choice), submission.num_emitted, end=end)
                for choice in submission.choices
            )
        )
    )
