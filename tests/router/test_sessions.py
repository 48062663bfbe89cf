"""Sessions at the router: their history, their turns, whose they are, and where they go."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.client import AsyncClient
from kvrelay.router.auth import bearer
from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.errors import UnknownSession
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.sessions import Sessions, _count_shared
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from .cluster import Cluster, HeldEncoding, Streamed, collect, running, status_of
from .scripted_worker import LENGTH, ScriptedWorker, load, until


@pytest.fixture
async def pairs(config: RouterConfig) -> AsyncIterator[Cluster]:
    """Two decode workers that compute prompts, too."""
    adaptive = replace(config, placement=PlacementMode.ADAPTIVE)
    async with running(adaptive, "decode-0", "decode-1") as cluster:
        cluster.count()
        yield cluster


async def opened(cluster: Cluster, **fields: Any) -> str:
    request = pb.OpenSessionRequest(session_id="chat", **fields)
    return str((await cluster.stub.OpenSession(request)).session_id)


def turn(cluster: Cluster, *ids: int, max_tokens: int = 2, n: int = 1, **fields: Any) -> Any:
    fields = {"session_id": "chat", **fields}
    metadata = fields.pop("metadata", None)
    params = pb.SamplingParams(max_tokens=max_tokens, n=n)
    request = pb.GenerateRequest(input_ids=pb.TokenIds(ids=ids), sampling_params=params, **fields)
    return cluster.stub.Generate(request, metadata=metadata)


async def said(cluster: Cluster, *ids: int, **fields: Any) -> Streamed:
    return await collect(turn(cluster, *ids, **fields))


async def state(cluster: Cluster) -> pb.SessionState:
    session: pb.SessionState
    [session] = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
    return session


async def until_idle(cluster: Cluster) -> pb.SessionState:
    while (session := await state(cluster)).running:
        await asyncio.sleep(0.005)
    return session


def submits(cluster: Cluster) -> list[worker_pb2.SubmitRequest]:
    return sorted((s for w in cluster.workers for s in w.submits), key=lambda s: s.attempt)


async def test_a_turn_follows_the_history_on_the_worker_that_has_it(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    await said(pairs, 10)
    await said(pairs, 20, 21)
    first, second, third = submits(pairs)
    assert list(first.input_ids) == [1, 2, 3]
    assert list(second.input_ids) == [1, 2, 3, 4, 5, 10]
    assert list(third.input_ids) == [1, 2, 3, 4, 5, 10, 11, 12, 20, 21]
    assert first.session.session == second.session.session != ""
    assert [len(worker.submits) for worker in pairs.workers].count(3) == 1, "all went to one"
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 4, 7)
    session = await state(pairs)
    assert (session.tokens, session.turns, session.kept_tokens) == (12, 3, 11)
    assert session.worker == next(w.name for w in pairs.workers if w.submits)


async def test_texts_go_on_without_special_tokens(pairs: Cluster, monkeypatch: Any) -> None:
    wanted: list[bool] = []

    def encode(tokenizer: Any, text: str, most: int, *, add_special_tokens: bool = True) -> Any:
        wanted.append(add_special_tokens)
        return [1, 2] if add_special_tokens else [2]

    monkeypatch.setattr("kvrelay.router.texts.encode", encode)
    await opened(pairs)
    for _ in range(2):
        params = pb.SamplingParams(max_tokens=1)
        await collect(
            pairs.stub.Generate(
                pb.GenerateRequest(text="a", session_id="chat", sampling_params=params)
            )
        )
    assert wanted == [True, False]
    assert list(submits(pairs)[1].input_ids) == [1, 2, 3, 2]


async def test_prefill_workers_hear_nothing_of_sessions(cluster: Cluster) -> None:
    cluster.count()
    await opened(cluster)
    await said(cluster, 1, 2, 3)
    assert cluster.decode.submits[0].HasField("session")
    assert not cluster.prefill.submits[0].HasField("session")


async def test_what_a_prefill_worker_reads_of_a_session_is_not_in_its_queue(
    config: RouterConfig,
) -> None:
    """Its turns would seem longer than they are, and so to be computed after others."""
    adaptive = replace(config, placement=PlacementMode.ADAPTIVE)
    async with running(adaptive, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await opened(cluster)
        await said(cluster, *range(1, 41))
        assert cluster.prefill.submits == []
        speeds = pb.StepSpeeds(
            seconds_per_step=0.01, seconds_per_token=0.001, prompts_known=True, rows_known=True
        )
        peer = pb.PeerTransfer(
            incarnation=cluster.prefill.incarnation, lent_tokens_per_second=1_000_000
        )
        busy = load()
        busy.MergeFrom(pb.WorkerLoad(running_requests=8, growth_tokens=800, speeds=speeds))
        cluster.decode.send(worker_pb2.AttachResponse(load=busy, peers=[peer]))
        links = cluster.router._fleet.links
        await until(lambda: any(link.load.running_requests == 8 for link in links))
        await said(cluster, *range(50, 60))
        [submit] = cluster.prefill.submits
        assert (len(submit.input_ids), submit.cached_tokens) == (52, 41)


@pytest.mark.parametrize(("rewind_to", "history"), [(3, [1, 2, 3]), (0, []), (5, [1, 2, 3, 4, 5])])
async def test_a_turn_goes_back(pairs: Cluster, rewind_to: int, history: list[int]) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    await said(pairs, 30, rewind_to=rewind_to)
    assert list(submits(pairs)[1].input_ids) == [*history, 30]
    assert (await state(pairs)).tokens == len(history) + 3
    error = await status_of(turn(pairs, 1, rewind_to=99))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "rewind_to" in str(error.details())
    assert not (await state(pairs)).running


@pytest.mark.parametrize(("fields", "name"), [
    ({"n": 2}, "n"), ({"cache_salt": "a"}, "cache_salt"),
    ({"session_id": "", "rewind_to": 0}, "rewind_to"),
    ({"session_id": "", "queue_turn": True}, "queue_turn"),
])  # fmt: skip
async def test_what_a_turn_cannot_have_is_refused_by_name(
    pairs: Cluster, fields: dict[str, Any], name: str
) -> None:
    await opened(pairs)
    error = await status_of(turn(pairs, 1, **fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith(f"{name}: ")
    assert not (await state(pairs)).running


async def test_an_empty_turn_is_refused(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    error = await status_of(turn(pairs))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await state(pairs)).tokens == 5


async def test_a_turn_while_one_runs_is_refused_or_waits(cluster: Cluster) -> None:
    await opened(cluster)
    first = turn(cluster, 1, 2, 3)
    submit = await cluster.prefill.submitted()
    error = await status_of(turn(cluster, 9))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    second, third = turn(cluster, 9, queue_turn=True), turn(cluster, 8, queue_turn=True)
    while (await state(cluster)).waiting_turns < 2:
        await asyncio.sleep(0.005)
    second.cancel()
    while (await state(cluster)).waiting_turns != 1:
        await asyncio.sleep(0.005)
    assert len(cluster.prefill.submits) == 1
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    await collect(first)
    later = await cluster.prefill.submitted(2)
    assert list(later.input_ids) == [1, 2, 3, 50, 8]
    cluster.prefill.say(later, 0, (51,), end=LENGTH)
    assert (await collect(third)).token_ids == [51]
    assert (await until_idle(cluster)).tokens == 6


@pytest.mark.parametrize("how", ["client leaves", "Abort", "no worker"])
async def test_a_turn_that_does_not_end_well_leaves_the_history(cluster: Cluster, how: str) -> None:
    await opened(cluster)
    first = turn(cluster, 1, 2, 3)
    submit = await cluster.prefill.submitted()
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    await collect(first)
    second = turn(cluster, 9, request_id="second")
    submit = await cluster.prefill.submitted(2)
    cluster.prefill.say(submit, 0, (51,))
    await second.read()
    if how == "client leaves":
        second.cancel()
    elif how == "Abort":
        await cluster.stub.Abort(pb.AbortRequest(request_id="second"))
    else:
        await cluster.prefill.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await second.read()
    session = await until_idle(cluster)
    assert (session.tokens, session.turns) == (4, 1)


async def test_a_lost_worker_costs_a_computation_and_never_the_session(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    await home.stop()
    await pairs.until_lost(home.name)
    await said(pairs, 10)
    assert list(submits(pairs)[1].input_ids) == [1, 2, 3, 4, 5, 10]
    assert submits(pairs)[1].cached_tokens == 0
    assert (await state(pairs)).worker != home.name


async def test_a_worker_that_has_given_a_session_up_is_expected_to_have_nothing(
    pairs: Cluster,
) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    name = home.submits[0].session.session
    home.send(worker_pb2.AttachResponse(ended_sessions=[name]))
    while (await state(pairs)).kept_tokens:
        await asyncio.sleep(0.005)
    await said(pairs, 10)
    assert submits(pairs)[1].cached_tokens == 0


async def test_workers_are_told_to_forget(pairs: Cluster) -> None:
    """What is closed, and what goes on elsewhere."""
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    [other] = [worker for worker in pairs.workers if worker is not home]
    home.send(worker_pb2.AttachResponse(load=full_load()))
    await until(lambda: all(link.load.pools for link in pairs.router._fleet.links))
    await until(lambda: any(link.load.room_tokens == 0 for link in pairs.router._fleet.links))
    await said(pairs, 10)
    assert len(other.submits) == 1, "the first one is full"
    name = home.submits[0].session.session
    await until(lambda: home.forgotten == [name])
    await pairs.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    await until(lambda: other.forgotten == [name])
    error = await status_of(turn(pairs, 1))
    assert error.code() == grpc.StatusCode.NOT_FOUND


def full_load() -> pb.WorkerLoad:
    pool = pb.PoolState(pool="full", page_size=16, total=64, held=64)
    return pb.WorkerLoad(pools=[pool])


async def test_a_session_closed_while_its_turn_runs_lets_it_end(cluster: Cluster) -> None:
    await opened(cluster)
    first, waiting = turn(cluster, 1, 2, 3), None
    submit = await cluster.prefill.submitted()
    waiting = turn(cluster, 4, queue_turn=True)
    while not (await state(cluster)).waiting_turns:
        await asyncio.sleep(0.005)
    await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    assert (await status_of(waiting)).code() == grpc.StatusCode.NOT_FOUND
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert (await collect(first)).token_ids == [50]
    await until(lambda: cluster.decode.forgotten == [submit_name(cluster.decode)])
    assert not (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
    await opened(cluster)  # the id is free again


def submit_name(worker: ScriptedWorker) -> str:
    return str(worker.submits[0].session.session)


async def test_a_session_goes_on_with_the_history_that_its_client_brings(pairs: Cluster) -> None:
    await opened(pairs, history=pb.TokenIds(ids=[1, 2, 3]))
    await said(pairs, 4)
    assert list(submits(pairs)[0].input_ids) == [1, 2, 3, 4]
    error = await status_of_open(pairs, "other", history=pb.TokenIds(ids=[402]))
    assert (error.code(), str(error.details())[:8]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "history:",
    )


async def status_of_open(
    cluster: Cluster, name: str, metadata: Any = None, **fields: Any
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.OpenSession(
            pb.OpenSessionRequest(session_id=name, **fields), metadata=metadata
        )
    return caught.value


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


def text_turn(cluster: Cluster, request_id: str) -> Any:
    params = pb.SamplingParams(max_tokens=2)
    message = pb.GenerateRequest(
        text="a", session_id="chat", request_id=request_id, sampling_params=params
    )
    return cluster.stub.Generate(message)


async def reopen(cluster: Cluster) -> None:
    await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    await opened(cluster)


async def test_a_turn_of_a_session_opened_anew_does_not_join_one_of_the_old_session(
    cluster: Cluster,
) -> None:
    await opened(cluster)
    old = text_turn(cluster, "x")
    submit = await cluster.prefill.submitted()
    await reopen(cluster)
    error = await status_of(text_turn(cluster, "x"))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "session that was closed" in str(error.details())
    assert not (await state(cluster)).running
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert (await collect(old)).token_ids == [50]
    assert (await state(cluster)).turns == 0


async def test_a_turn_ends_when_one_of_the_old_session_was_tokenized_before_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [HeldEncoding(), HeldEncoding()]
    left = iter(held)
    monkeypatch.setattr("kvrelay.router.texts.encode", lambda *args: next(left).encode(*args))
    await opened(cluster)
    old = text_turn(cluster, "x")
    await until(lambda: bool(held[0].texts))
    await reopen(cluster)
    new = text_turn(cluster, "x")
    await until(lambda: bool(held[1].texts))
    held[0].let_go.set()
    submit = await cluster.prefill.submitted()
    held[1].let_go.set()
    error = await status_of(new)
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert not (await state(cluster)).running, "the session is free for its next turn"
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    await collect(old)


async def test_a_lost_stream_takes_the_kept_tokens_with_it(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    home.break_stream()
    await until(lambda: not all(link.ready for link in pairs.router._fleet.links))
    await until(lambda: all(link.ready for link in pairs.router._fleet.links))
    assert ((await state(pairs)).kept_tokens, (await state(pairs)).worker) == (0, "")
    await said(pairs, 10)
    assert submits(pairs)[1].cached_tokens == 0


def test_a_worker_that_had_a_turn_which_was_given_up_is_told_to_forget(
    config: RouterConfig,
) -> None:
    """It may have finished the turn, and kept it, before it heard that nobody wants it."""
    told: list[tuple[str, str]] = []
    sessions = Sessions(config, RouterMetrics("counter"), lambda *call: told.append(call))
    session = sessions.open(ANYBODY, pb.OpenSessionRequest(session_id="chat"), 402)
    for tokens, worker in ((None, "b"), ([1, 2, 3], "c"), (None, "c"), (None, "")):
        turn = sessions.begin_if_free(ANYBODY, "chat")
        assert turn is not None
        turn.end(tokens, worker)
    assert told == [("b", session.name)], "c keeps the session"


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_the_shared_length_is_found(length: int) -> None:
    mine = array("I", range(length))
    assert _count_shared(mine, array("I", [*range(length), 7]), 0) == length
    for at in {0, 1, length // 2, length - 1} - {length}:
        theirs = array("I", mine)
        theirs[at] += 1
        for known in {0, at // 2, at}:
            assert _count_shared(mine, theirs, known) == at
            assert _count_shared(theirs[: at + 1], mine, known) == at


async def test_a_repeated_turn_takes_the_place_of_the_last_one(pairs: Cluster) -> None:
    """Its client has not heard of its end."""
    await opened(pairs)
    await said(pairs, 1, 2, 3, request_id="first")
    for _ in range(2):
        assert (await said(pairs, 10, request_id="second")).token_ids == [11, 12]
    assert list(submits(pairs)[1].input_ids) == list(submits(pairs)[2].input_ids)
    assert (await state(pairs)).tokens == 8
    await said(pairs, 11, request_id="second")  # another body
    assert (await state(pairs)).tokens == 11


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


async def test_the_client_has_turns(pairs: Cluster) -> None:
    async with AsyncClient(pairs.router.grpc_address) as client:
        await client.call("OpenSession", pb.OpenSessionRequest(session_id="chat"))
        for new, answer in (([1, 2, 3], [4, 5]), ([10], [11, 12])):
            turn = await client.answer(new, session_id="chat", max_tokens=2)
            assert turn.token_ids == answer
        back = await client.answer([9], session_id="chat", rewind_to=0, max_tokens=2)
        assert back.complete.usage.prompt_tokens == 1
        await client.call("CloseSession", pb.CloseSessionRequest(session_id="chat"))
