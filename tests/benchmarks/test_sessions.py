"""What the benchmark of sessions sends in each way, and what it makes of a round."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from benchmarks import sessions
from benchmarks.sessions import WAYS, Load, Part, Round, Way, one_round, rows, write_page
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

from .conftest import ScriptedService

LOAD = Load(conversations=2, turns=3, first_tokens=8, new_tokens=4, output_tokens=2)


class WithSessions(ScriptedService):
    """Opens and closes sessions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[pb.OpenSessionRequest] = []
        self.closed: list[str] = []

    async def OpenSession(  # noqa: N802
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        self.opened.append(request)
        return pb.OpenSessionResponse(session_id=request.session_id)

    async def CloseSession(  # noqa: N802
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        self.closed.append(request.session_id)
        return pb.CloseSessionResponse()


async def played(monkeypatch: pytest.MonkeyPatch, way: Way, load: Load = LOAD) -> WithSessions:
    """The service after one round, which took 50 tokens and a read."""
    counts = iter([{"computed": 10.0, "read": 1.0}, {"computed": 60.0, "read": 2.0}])

    async def counted(stub: object) -> dict[str, float]:
        return next(counts)

    monkeypatch.setattr(sessions, "counters", counted)
    service, server = WithSessions(), grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            result = await one_round(rpc.InferenceServiceStub(channel), load, way, 1)
            # The server hears a little later that a client has left a stream.
            await asyncio.wait_for(service.idle.wait(), 60)
    finally:
        await server.stop(None)
    assert (result.computed_tokens, result.history_reads) == (50, 1)
    own = [one for one in service.requests if one.sampling_params.max_tokens == 2]
    assert result.sent_tokens == sum(len(one.input_ids.ids) for one in own)
    assert len(own) == 6
    assert len(result.ttfts) == 4, "each conversation's first turn is left out"
    assert bool(result.itls) is bool(load.streams)
    return service


@pytest.mark.parametrize("way", Way)
async def test_what_is_sent(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    service = await played(monkeypatch, way)
    lengths = sorted(len(one.input_ids.ids) for one in service.requests)
    names = {one.session_id for one in service.requests}
    salts = {one.cache_salt for one in service.requests}
    if way.by_session:
        assert lengths == [4, 4, 4, 4, 8, 8]
        assert names == {one.session_id for one in service.opened} == {*service.closed}
        assert len(names) == 2
        kept = {one.max_kept_tokens for one in service.opened if one.HasField("max_kept_tokens")}
        assert kept == ({0} if way is Way.RECOMPUTED else set())
    else:
        assert lengths == [8, 8, 14, 14, 20, 20]
        assert names == {""}
        assert len(salts) == (6 if way is Way.ANEW else 2)


async def test_streams_run_beside_long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(conversations=2, turns=3, first_tokens=8, new_tokens=4, output_tokens=2, streams=1)
    service = await played(monkeypatch, Way.READ, load)
    assert len(service.requests) > 6


def test_each_part_has_its_ways_and_each_way_a_part() -> None:
    assert WAYS.keys() == set(Part)
    assert {way for ways in WAYS.values() for way in ways} == set(Way)
    for part in (Part.CHAT, Part.MANY):
        assert Way.SESSION in WAYS[part]
        assert Way.PREFIXES in WAYS[part], "what sessions are compared with"


def test_a_page_keeps_its_text_and_the_figures_of_other_parts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nText.\n\n## Figures\n\nold\n")
    result = Round("session", 2.0, 100, 30, 0.0, [0.001, 0.003, 0.002])
    write_page(page, {"chat": "\n".join(rows([result, result]))})
    write_page(page, {"long": "second"})
    text = page.read_text()
    assert text.startswith("# Title\n\nText.\n\n## Figures\n")
    assert "old" not in text
    assert text.index("### Chat") < text.index("2, 2") < text.index("### Long\n\nsecond")
    assert text.count("## Figures") == 1
