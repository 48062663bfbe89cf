"""A request with a grammar joins the engine when it is compiled, and nobody waits for that."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from kvrelay.engine.scheduler.commands import Cancel, Inbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.worker.service import WorkerService
from kvrelay.text.grammar import GrammarError
from kvrelay.v1 import worker_pb2
from kvrelay.wire.worker_info import WorkerRole

from .test_submit_rules import message, rules

WITH_GRAMMAR = {"structured_output": {"regex": "a"}}


class Served:
    """A worker's service whose grammars are compiled when the test says so."""

    def __init__(self) -> None:
        self.inbox = Inbox[Any]()
        self.link = RouterLink("router")
        self.compiled: Future[object] = Future()
        self.service = WorkerService(
            "w", self.inbox, rules(WorkerRole.PREFILL), (), lambda _: self.compiled
        )

    def submit(self, request_id: str, **params: Any) -> None:
        submit = message(request_id=request_id, params=params)
        self.service.take(worker_pb2.AttachRequest(submit=submit), self.link)

    def cancel(self, request_id: str) -> None:
        cancel = worker_pb2.CancelRequest(request_id=request_id, attempt=1)
        self.service.take(worker_pb2.AttachRequest(cancel=cancel), self.link)

    async def posted(self) -> list[tuple[type, str]]:
        """Which commands have come for which request."""
        await asyncio.sleep(0)
        commands = self.inbox.take_all() if self.inbox else []
        assert all(isinstance(command, Submit | Cancel) for command in commands)
        return [(type(command), command.key.request_id) for command in commands]


async def test_others_pass_a_request_whose_grammar_is_not_compiled() -> None:
    served = Served()
    served.submit("slow", **WITH_GRAMMAR)
    served.submit("plain")
    assert await served.posted() == [(Submit, "plain")]
    served.compiled.set_result(None)
    assert await served.posted() == [(Submit, "slow")]
    served.submit("next", **WITH_GRAMMAR)
    assert await served.posted() == [(Submit, "next")]


async def test_a_cancellation_stays_behind_its_submission() -> None:
    served = Served()
    served.submit("slow", **WITH_GRAMMAR)
    served.cancel("slow")
    served.cancel("other")
    assert await served.posted() == [(Cancel, "other")]
    served.compiled.set_exception(GrammarError("cannot be used"))
    assert await served.posted() == [(Submit, "slow"), (Cancel, "slow")]


async def test_nothing_of_a_router_that_has_left_is_posted() -> None:
    served = Served()
    served.submit("slow", **WITH_GRAMMAR)
    served.service._submits.forget(served.link)
    served.compiled.set_result(None)
    assert await served.posted() == []
