"""What an engine says, as a router hears it over the stream between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kvrelay.engine.scheduler.commands import Attach, Inbox, Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.worker.held_submits import Prepare
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.net.channels import bind, worker_server
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput, SampledToken
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.router.scripted_worker import ScriptedWorker, until
from tests.router.test_worker_link import Heard, submission

Ends = tuple[WorkerLink, RouterLink]
"""The router's and the engine's end of a stream between them."""


@asynccontextmanager
async def attached(
    routers: int, prepare: Prepare = lambda _: None
) -> AsyncIterator[tuple[list[tuple[WorkerLink, RouterLink]], Inbox[Any]]]:
    """Streams of routers to one real service, and its engine's inbox; `prepare`: see there."""
    server, inbox = worker_server(), Inbox[Any]()
    endpoint = ScriptedWorker("aggregated-0", WorkerRole.AGGREGATED).endpoint
    rules = SubmitRules(WorkerRole.AGGREGATED, 512, ())
    service = WorkerService(endpoint.incarnation, inbox, rules, (), prepare)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', None)}"
    await server.start()
    stale: list[None] = []
    found: list[Ends] = []
    running: list[asyncio.Task[None]] = []
    for number in range(routers):
        link = WorkerLink(
            replace(endpoint, address=address),
            router_id=f"router-{number}",
            credentials=None,
            max_message_bytes=1 << 20,
            on_change=lambda link: None,
            on_stale=lambda: stale.append(None),
            on_killed=lambda output: None,
            prefixes=KnownPrefixes(16),
        )
        running.append(asyncio.create_task(link.run()))
        attach = await next_of(inbox)
        assert isinstance(attach, Attach)
        attach.link.deliver(EngineOutputs((), WorkerLoad()))
        await until(link_is_ready(link))
        found.append((link, attach.link))
    try:
        yield found, inbox
    finally:
        assert not stale
        for task in running:
            task.cancel()
        await server.stop(None)


def link_is_ready(link: WorkerLink) -> Callable[[], bool]:
    return lambda: link.ready


async def next_of(inbox: Inbox[Any]) -> object:
    """The one command that the engine is sent."""
    await until(lambda: len(inbox) == 1)
    (command,) = inbox.take_all()
    return command


async def submitted(link: WorkerLink, inbox: Inbox[Any], attempt: int, heard: Heard) -> RequestKey:
    """Submit an attempt at a request of eight tokens."""
    link.submit(submission("a", 8, attempt), heard)
    command = await next_of(inbox)
    assert isinstance(command, Submit)
    return command.key


def said_of(key: RequestKey, token: int) -> list[EngineOutputs]:
    """Two tokens, the first with its log-probability, and the end: a message a step."""
    first = RequestOutput(key, 0, (SampledToken(token, -0.5),))
    then = RequestOutput(key, 1, (SampledToken(token + 1),))
    last = RequestOutput(key, 2, (SampledToken(token + 2),), RequestEnd(EndReason.LENGTH))
    return [EngineOutputs((one,)) for one in (first, then, last)]


def seen(heard: Heard) -> list[tuple[int, list[int], bool]]:
    """What was heard, in order."""
    return [
        (one.index, [token.token_id for token in one.tokens], one.end is not None)
        for one in heard.outputs
    ]


def expected(token: int) -> list[tuple[int, list[int], bool]]:
    return [(0, [token], False), (1, [token + 1], False), (2, [token + 2], True)]


async def test_each_step_of_two_requests_comes_whole_and_in_order():
    async with attached(routers=1) as ([(link, engines_end)], inbox):
        heard = [Heard(), Heard()]
        keys = [await submitted(link, inbox, 3 + number, one) for number, one in enumerate(heard)]
        steps = zip(said_of(keys[0], 40), said_of(keys[1], 50), strict=True)
        for first, second in steps:
            engines_end.deliver(EngineOutputs(first.outputs + second.outputs))
        await until(lambda: all(len(one.outputs) == 3 for one in heard))
        assert [seen(one) for one in heard] == [expected(40), expected(50)]


async def test_attempts_of_two_routers_with_one_number_are_two():
    async with attached(routers=2) as (links, inbox):
        heard = [Heard(), Heard()]
        keys = [
            await submitted(link, inbox, 3, one)
            for (link, _), one in zip(links, heard, strict=True)
        ]
        assert keys[0] != keys[1]
        for number, (_, engines_end) in enumerate(links):
            for outputs in said_of(keys[number], 40 + 10 * number):
                engines_end.deliver(outputs)
        await until(lambda: all(len(one.outputs) == 3 for one in heard))
        assert [seen(one) for one in heard] == [expected(40), expected(50)]
