"""A request with a grammar joins the engine when it is compiled, and nobody waits for that."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from llguidance import LLTokenizer

from kvrelay.engine.scheduler.commands import Detach, Inbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.engine.worker.held_submits import Prepare
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.text import grammar
from kvrelay.text.grammar import GrammarError, Grammars
from kvrelay.v1 import inference_pb2, worker_pb2
from kvrelay.wire.output import EndReason, RequestEnd
from kvrelay.wire.submit import CancelRequest
from kvrelay.wire.worker_info import WorkerRole
from tests.known import known
from tests.router.scripted_worker import until
from tests.router.test_worker_link import Heard, submission
from tests.vocabularies import byte_vocabulary

from .test_router_stream import attached, next_of
from .test_submit_rules import message, rules

WITH_GRAMMAR = {"structured_output": {"regex": "a"}}


class Served:
    """A worker's service.

    Args:
        prepare: compiles grammars; None: they are compiled when the test says so.
    """

    def __init__(self, prepare: Prepare | None = None) -> None:
        self.inbox = Inbox[Any]()
        self.link = RouterLink("router")
        self.compiled: Future[object] = Future()
        self.service = WorkerService(
            "w", self.inbox, rules(WorkerRole.PREFILL), (), prepare or (lambda _: self.compiled)
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
        assert all(isinstance(command, Submit | CancelRequest) for command in commands)
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


async def test_a_submission_that_waits_is_cancelled_at_once() -> None:
    served = Served()
    waiting = message(request_id="slow", first_choice=2, num_prompt_tokens=2, params=WITH_GRAMMAR)
    served.service.take(worker_pb2.AttachRequest(submit=waiting), served.link)
    served.cancel("slow")
    served.cancel("other")
    [outputs] = served.link.take_all()
    [output] = known(outputs).outputs
    assert (output.key.request_id, output.key.attempt, output.key.choice) == ("slow", 1, 2)
    assert (output.index, output.end) == (1, RequestEnd(EndReason.ABORTED))
    served.compiled.set_exception(GrammarError("cannot be used"))
    assert await served.posted() == [(CancelRequest, "other")]


async def test_a_worker_that_drains_gives_back_what_waits_and_holds_nothing_more() -> None:
    """The engine says that it has drained when it has no request: it does not know of these."""
    served = Served()
    waiting = message(request_id="slow", first_choice=2, num_prompt_tokens=2, params=WITH_GRAMMAR)
    served.service.take(worker_pb2.AttachRequest(submit=waiting), served.link)
    served.service.retract_held()
    [outputs] = served.link.take_all()
    [output] = known(outputs).outputs
    assert (output.key.request_id, output.key.attempt, output.key.choice) == ("slow", 1, 2)
    assert (output.index, output.end) == (1, RequestEnd(EndReason.RETRACTED))
    served.submit("late", **WITH_GRAMMAR)
    assert await served.posted() == [(Submit, "late")], "the engine retracts it"
    served.compiled.set_result(None)
    assert await served.posted() == []


async def test_nothing_is_compiled_for_those_who_have_left() -> None:
    go = threading.Event()

    def make() -> LLTokenizer:
        assert go.wait(60)
        return byte_vocabulary()

    compiled: list[float] = []
    grammars = Grammars(make)
    grammars.on_compiled = compiled.append
    served = Served(grammars.prepare)
    for request_id in "abcd":
        served.submit(request_id, structured_output={"regex": request_id})
    for request_id in "bc":
        served.cancel(request_id)
    go.set()
    await until(lambda: len(served.inbox) == 2)
    assert await served.posted() == [(Submit, "a"), (Submit, "d")]
    assert len(compiled) == 2


async def test_a_request_keeps_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come after it: or a forward would wait until it is compiled again."""
    monkeypatch.setattr(grammar, "_MOST_KEPT", 1)
    compiled: list[float] = []
    grammars = Grammars(byte_vocabulary)
    grammars.on_compiled = compiled.append
    served = Served(grammars.prepare)
    for request_id in "abc":
        served.submit(request_id, structured_output={"regex": request_id})
    await until(lambda: len(served.inbox) == 3)
    requests = [Request.of(submit) for submit in served.inbox.take_all()]
    for request in requests:
        grammars.prepare(known(request.params.sampling.structured_output)).result()
    assert len(compiled) == 3


async def test_nothing_of_a_router_that_has_left_is_posted() -> None:
    compiled: list[Future[object]] = []

    def prepare(_: object) -> Future[object]:
        compiled.append(Future())
        return compiled[-1]

    async with attached(routers=1, prepare=prepare) as ([(link, engines_end)], inbox):
        structured = inference_pb2.StructuredOutput(regex="a")
        link.submit(submission("slow", 8, structured_output=structured), Heard())
        await until(lambda: bool(compiled))
        engines_end.close()
        assert isinstance(await next_of(inbox), Detach)
        compiled[0].set_result(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not [command for command in inbox if isinstance(command, Submit)]
