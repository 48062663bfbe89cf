"""Sessions at the router: how many, how long, whose, and when they expire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvrelay.router.access.auth import bearer
from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import UnknownSession
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.sessions import Sessions
from kvrelay.v1 import inference_pb2 as pb

from .cluster import collect, running, status_of
from .scripted_worker import LENGTH
from .session_calls import opened, said, state, status_of_open, turn


async def test_ids_bounds_and_numbers_of_sessions(config: RouterConfig) -> None:
    small = replace(config, max_sessions=2, max_session_tokens=20, session_timeout=50.0)
    async with running(small, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await opened(cluster)
        again = await status_of_open(cluster, "chat")
        assert again.code() == grpc.StatusCode.ALREADY_EXISTS
        too_long = await status_of_open(cluster, "x" * 129)
        assert too_long.code() == grpc.StatusCode.INVALID_ARGUMENT
        drawn = await cluster.stub.OpenSession(pb.OpenSessionRequest(idle_timeout_seconds=90))
        assert (len(drawn.session_id), drawn.idle_timeout_seconds) == (32, 50)
        full = await status_of_open(cluster, "third")
        assert full.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await said(cluster, *range(20))
        error = await status_of(turn(cluster, 1))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
        await opened(cluster)


async def test_a_turn_that_shortens_the_history_is_served_when_histories_are_full(
    config: RouterConfig,
) -> None:
    small = replace(config, max_session_tokens=20)
    async with running(small, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await opened(cluster)
        await said(cluster, *range(18))
        error = await status_of(turn(cluster, 1))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status_of_open(cluster, "other")
        longer = await status_of(turn(cluster, 1, 2, rewind_to=19))
        assert longer.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await said(cluster, 1, rewind_to=5)
        assert (await state(cluster)).tokens == 8
        await said(cluster, *range(10))


async def test_turns_that_run_at_the_same_time_do_not_exceed_the_bound(
    config: RouterConfig,
) -> None:
    small = replace(config, max_session_tokens=20)
    async with running(small, "prefill-0", "decode-0") as cluster:
        for name in ("chat", "other"):
            await cluster.stub.OpenSession(pb.OpenSessionRequest(session_id=name))
        first = turn(cluster, *range(15))
        submit = await cluster.prefill.submitted()
        error = await status_of(turn(cluster, *range(6), session_id="other"))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        cluster.prefill.say(submit, 0, (50,), end=LENGTH)
        await collect(first)
        await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
        assert cluster.router._sessions._num_tokens == 0


async def test_sessions_belong_to_their_token(config: RouterConfig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice-token-123456\nbobby-token-123456\n")
    async with running(replace(config, auth_token_file=tokens), "prefill-0", "decode-0") as cluster:
        cluster.count()
        alice, bob = (bearer(f"{name}-token-123456") for name in ("alice", "bobby"))
        stub, open_it = cluster.stub, pb.OpenSessionRequest(session_id="chat")
        await stub.OpenSession(open_it, metadata=alice)
        listed = await stub.GetSessions(pb.GetSessionsRequest(), metadata=bob)
        assert not listed.sessions
        close = pb.CloseSessionRequest(session_id="chat")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CloseSession(close, metadata=bob)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        await stub.OpenSession(open_it, metadata=bob)
        await stub.CloseSession(close, metadata=bob)
        assert len((await stub.GetSessions(pb.GetSessionsRequest(), metadata=alice)).sessions) == 1


async def test_one_token_takes_no_more_than_its_share(config: RouterConfig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice-token-123456\nbobby-token-123456\n")
    small = replace(config, auth_token_file=tokens, max_sessions=5, max_session_tokens=40)
    async with running(small, "prefill-0", "decode-0") as cluster:
        cluster.count()
        alice, bob = (bearer(f"{name}-token-123456") for name in ("alice", "bobby"))
        stub, history = cluster.stub, pb.TokenIds(ids=range(19))
        for name in ("chat", "other"):
            await stub.OpenSession(pb.OpenSessionRequest(session_id=name), metadata=alice)
        many = await status_of_open(cluster, "third", metadata=alice)
        assert many.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 sessions of this token" in str(many.details())
        await collect(turn(cluster, *range(15), metadata=alice))
        long = await status_of(turn(cluster, *range(4), session_id="other", metadata=alice))
        assert long.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "17 tokens (--max-session-share)" in str(long.details())
        request = pb.OpenSessionRequest(session_id="chat", history=history)
        await stub.OpenSession(request, metadata=bob)
        await stub.CloseSession(pb.CloseSessionRequest(session_id="chat"), metadata=alice)
        await collect(turn(cluster, *range(15), session_id="other", metadata=alice))


def test_10_000_sessions_that_are_left_expire_and_leave_nothing(config: RouterConfig) -> None:
    now, told = [0.0], []
    sessions = Sessions(
        config, RouterMetrics("counter"), lambda *call: told.append(call), lambda: now[0]
    )
    busy = []
    for number in range(10_000):
        message = pb.OpenSessionRequest(idle_timeout_seconds=1 + number % 7)
        session = sessions.open(ANYBODY, message, 402)
        turn = sessions.begin_if_free(ANYBODY, session.session_id)
        assert turn is not None
        if number % 100:
            turn.end([1, 2, 3], "decode-0")
        else:
            busy.append(turn)
    now[0] = 3.5
    sessions.expire()
    assert 100 < len(sessions) < 10_000
    now[0] = 10.0
    sessions.expire()
    assert len(sessions) == 100, "those that run are spared"
    for one in busy:
        one.end([1, 2], "decode-1")
    now[0] = 16.9
    sessions.expire()
    now[0] = 17.0
    sessions.expire()
    assert (len(sessions), sessions._num_tokens, len(told)) == (0, 0, 10_000)
    with pytest.raises(UnknownSession):
        sessions.close(ANYBODY, "any")
