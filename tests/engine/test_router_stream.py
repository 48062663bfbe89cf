"""What an engine says, as a router hears it over the stream between them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvrelay.engine.scheduler.commands import Attach, Inbox, Submit
from kvrelay.engine.worker.service import WorkerService
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.net.ends import bind, worker_server
from kvrelay.router.known_prefixes import KnownPrefixes
from kvrelay.router.worker_link import WorkerLink
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import EndReason, EngineOutputs, RequestEnd, RequestOutput, SampledToken
from kvrelay.wire.worker_info import WorkerRole
from tests.router.scripted_worker import ScriptedWorker, until
from tests.router.test_worker_link import Heard, submission


def by_index(output: RequestOutput) -> int:
    return output.index


async def test_a_steps_tokens_come_as_they_were_said():
    server, inbox = worker_server(), Inbox[Any]()
    endpoint = ScriptedWorker("aggregated-0", WorkerRole.AGGREGATED).endpoint
    service = WorkerService(
        endpoint.incarnation, inbox, SubmitRules(WorkerRole.AGGREGATED, 512, ())
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    stale: list[None] = []
    link = WorkerLink(
        replace(endpoint, address=f"127.0.0.1:{port}"),
        router_id="router",
        credentials=None,
        max_message_bytes=1 << 20,
        on_change=lambda link: None,
        on_stale=lambda: stale.append(None),
        on_killed=lambda output: None,
        prefixes=KnownPrefixes(16),
    )
    running = asyncio.create_task(link.run())
    await until(lambda: len(inbox) == 1)
    (attach,) = inbox.take_all()
    assert isinstance(attach, Attach)
    attach.link.deliver(EngineOutputs((), WorkerLoad()))
    await until(lambda: link.ready)
    heard = Heard()
    for attempt, request_id in ((3, "a"), (4, "b")):
        link.submit(submission(request_id, 8, attempt), heard)
    await until(lambda: len(inbox) == 2)
    a, b = inbox.take_all()
    assert isinstance(a, Submit)
    said = (
        RequestOutput(a.key, 0, (SampledToken(40),)),
        RequestOutput(b.key, 0, (SampledToken(50, -0.5),)),
        RequestOutput(b.key, 1, (SampledToken(51),)),
        RequestOutput(a.key, 1, (SampledToken(41),), RequestEnd(EndReason.LENGTH)),
    )
    attach.link.deliver(EngineOutputs(said))
    await until(lambda: len(heard.outputs) == 4)
    for attempt, one in ((3, a), (4, b)):
        expected = [(o.index, o.tokens, o.end) for o in said if o.key == one.key]
        got = [o for o in heard.outputs if o.key.attempt == attempt]
        assert [(o.index, o.tokens, o.end) for o in sorted(got, key=by_index)] == expected
    assert not stale
    running.cancel()
    await server.stop(None)
