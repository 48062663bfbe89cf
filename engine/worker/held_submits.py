"""The submissions that wait for their grammars, so that the forward thread need not wait."""

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
"""A function that begins to compile a grammar, kept while its future is held; None: there is
none."""


class HeldSubmits:
    """The submissions on their way to the engine, held until their grammars are compiled.

    Call it on the event loop. The number held is bounded by the requests that a router may have.
    Grammars are compiled one after the other, and not at all if their requests have ended.

    Args:
        inbox: the engine's.
        prepare: begins to compile a grammar.
    """

    def __init__(self, inbox: Mailbox[Command], prepare: Prepare) -> None:
        self._inbox = inbox
        self._prepare = prepare
        self._held: dict[RequestKey, Submit] = {}
        self._draining = False

    def submit(self, command: Submit) -> None:
        """Post a submission once its grammar is compiled, or has failed."""
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
        """Post a cancellation; a held submission ends here instead."""
        held = self._held.pop(command.key.of_choice(0), None)
        if held is None:
            self._inbox.post(command)
            return
        _end(held, EndReason.ABORTED)

    def retract_all(self) -> None:
        """Retract the held submissions: routers submit them to other workers.

        Nothing is held from now on: the engine, which drains, retracts later submissions.
        """
        self._draining = True
        held, self._held = self._held, {}
        for command in held.values():
            _end(command, EndReason.RETRACTED)

    def forget(self, link: RouterLink) -> None:
        """Drop the submissions of a stream that has ended."""
        for key, held in list(self._held.items()):
            if held.link is link:
                del self._held[key]

    def _release(self, key: RequestKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._inbox.post(held)


def _end(held: Submit, reason: EndReason) -> None:
    """Send a router the end of a submission that the engine has not seen."""
    submission, end = held.submission, RequestEnd(reason)
    held.link.deliver(
        EngineOutputs(
            tuple(
                RequestOutput(held.key.of_choice(choice), submission.num_emitted, end=end)
                for choice in submission.choices
            )
        )
    )
