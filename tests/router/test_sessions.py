"""Sessions at the router: their history and their turns."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import grpc
import pytest

from kvrelay.client import AsyncClient
from kvrelay.router.sessions import _count_shared
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, HeldEncoding, collect, status_of
from .scripted_worker import LENGTH, ScriptedWorker, until
from .session_calls import opened, said, state, status_of_open, submits, turn, until_idle


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

    monkeypatch.setattr("kvrelay.router.admission.served_tokenizer.encode", encode)
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
    monkeypatch.setattr(
        "kvrelay.router.admission.served_tokenizer.encode", lambda *args: next(left).encode(*args)
    )
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


async def test_the_client_has_turns(pairs: Cluster) -> None:
    async with AsyncClient(pairs.router.grpc_address) as client:
        await client.call("OpenSession", pb.OpenSessionRequest(session_id="chat"))
        for new, answer in (([1, 2, 3], [4, 5]), ([10], [11, 12])):
            turn = await client.answer(new, session_id="chat", max_tokens=2)
            assert turn.token_ids == answer
        back = await client.answer([9], session_id="chat", rewind_to=0, max_tokens=2)
        assert back.complete.usage.prompt_tokens == 1
        await client.call("CloseSession", pb.CloseSessionRequest(session_id="chat"))
