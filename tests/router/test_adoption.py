"""Sessions that go on at another router, by the digest of their history."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.router.access.auth import bearer
from kvrelay.router.admission import session_adoption
from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.history_digest import history_digest

from .cluster import Cluster, collect, running
from .scripted_worker import LENGTH, until
from .session_calls import opened, said, state, submits, turn

HISTORY = [1, 2, 3, 4, 5]
DIGEST = history_digest(array("I", HISTORY))


async def adopt(cluster: Cluster, digest: str = DIGEST, **fields: Any) -> pb.OpenSessionResponse:
    metadata = fields.pop("metadata", None)
    request = pb.OpenSessionRequest(session_id="chat", history_digest=digest, **fields)
    answer: pb.OpenSessionResponse
    answer = await cluster.stub.OpenSession(request, metadata=metadata)
    return answer


async def refused(cluster: Cluster, *args: Any, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await adopt(cluster, *args, **fields)
    return caught.value


async def test_a_history_is_found_on_a_worker_and_gone_on_with(pairs: Cluster) -> None:
    pairs.workers[0].finds = {"": HISTORY}
    answer = await adopt(pairs)
    assert (answer.session_id, answer.tokens) == ("chat", 5)
    session = await state(pairs)
    assert (session.tokens, session.history_digest) == (5, DIGEST)
    await said(pairs, 10)
    assert list(submits(pairs)[0].input_ids) == [*HISTORY, 10]
    assert (
        await pairs.metric('kvrelay_router_session_adoptions_total{model="counter",outcome="found"')
        == 1
    )


async def test_prefill_workers_are_not_asked(cluster: Cluster) -> None:
    cluster.decode.finds = {"": HISTORY}
    assert (await adopt(cluster)).tokens == 5
    assert cluster.decode.asked_for == [("", DIGEST)]
    assert not cluster.prefill.asked_for, "they keep no histories"


async def test_a_turn_tells_its_digest_and_it_names_the_history_here_too(pairs: Cluster) -> None:
    await opened(pairs)
    assert (await state(pairs)).history_digest == ""
    first = await said(pairs, 1, 2, 3)
    assert first.complete is not None
    assert first.complete.history_digest == DIGEST == (await state(pairs)).history_digest
    request = pb.OpenSessionRequest(session_id="branch", history_digest=DIGEST)
    assert (await pairs.stub.OpenSession(request)).tokens == 5
    assert not [one for worker in pairs.workers for one in worker.asked_for]
    await said(pairs, 20, session_id="branch")
    await said(pairs, 10)
    assert [list(one.input_ids)[5:] for one in submits(pairs)[1:]] == [[20], [10]]


async def test_requests_without_a_session_and_aborted_turns_have_no_digest(
    cluster: Cluster,
) -> None:
    await opened(cluster)
    aborted = cluster.stub.Generate(
        pb.GenerateRequest(
            input_ids=pb.TokenIds(ids=[1]), session_id="chat", request_id="x",
            sampling_params=pb.SamplingParams(max_tokens=4),
        )
    )  # fmt: skip
    await cluster.prefill.submitted()
    await cluster.stub.Abort(pb.AbortRequest(request_id="x"))
    ends = [one.complete async for one in aborted if one.HasField("complete")]
    assert [(end.finish_reason, end.history_digest) for end in ends] == [
        (pb.FINISH_REASON_ABORT, "")
    ]
    cluster.count()
    plain = [one async for one in cluster.generate(max_tokens=2)]
    assert plain[-1].complete.history_digest == ""


async def test_what_nobody_has_is_not_found_and_who_is_silent_may_be_asked_again(
    pairs: Cluster,
) -> None:
    error = await refused(pairs)
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert str(error.details()).startswith("history_digest: ")
    pairs.workers[1].finds = None
    assert (await refused(pairs)).code() == grpc.StatusCode.UNAVAILABLE
    pairs.workers[0].finds = {"": [1, 2, 3, 4, 6]}
    pairs.workers[1].finds = {}
    assert (await refused(pairs)).code() == grpc.StatusCode.NOT_FOUND, "it is another history"
    assert not (await pairs.stub.GetSessions(pb.GetSessionsRequest())).sessions


@pytest.mark.parametrize("is_found", [False, True])
async def test_a_worker_that_leaves_while_it_is_asked(
    pairs: Cluster, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channel ends with its stream; the adoption goes by what the others say."""
    monkeypatch.setattr(session_adoption, "_SECONDS", 3600.0)
    left, other = pairs.workers
    left.may_find.clear()
    other.may_find.clear()
    other.finds = {"": HISTORY} if is_found else {}
    asked = asyncio.create_task(adopt(pairs))
    await until(lambda: bool(left.asked_for and other.asked_for))
    pairs.discovery.replace([other.endpoint])
    await pairs.until_lost(left.endpoint.name)
    other.may_find.set()
    async with asyncio.timeout(60):
        if is_found:
            assert (await asked).tokens == len(HISTORY)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "1 workers that may have the history do not answer" in caught.value.details()
    left.may_find.set()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, grpc.StatusCode.ALREADY_EXISTS),
        ({"cache_salt": 200 * "a"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"idle_timeout_seconds": 0}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["id in use", "salt", "time-out"],
)
async def test_who_is_refused_in_any_case_takes_nothing_from_a_worker(
    pairs: Cluster, fields: dict[str, Any], status: grpc.StatusCode
) -> None:
    """A worker that is asked ends the KV of the session."""
    await opened(pairs)
    pairs.workers[0].finds = {"": HISTORY}
    assert (await refused(pairs, **fields)).code() == status
    assert not [one for worker in pairs.workers for one in worker.asked_for]


@pytest.mark.parametrize("closed", ["after it is back", "before it is back"])
async def test_a_session_that_ends_is_forgotten_on_a_worker_whose_stream_had_broken(
    pairs: Cluster, closed: str
) -> None:
    """Histories outlive streams: the worker has it still, though the router expects no KV."""
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    home.break_stream()
    await until(lambda: not all(link.ready for link in pairs.router._fleet.links))
    if closed == "after it is back":
        await until(lambda: all(link.ready for link in pairs.router._fleet.links))
    await pairs.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    await until(lambda: home.forgotten == [home.submits[0].session.session])


async def test_a_turn_of_a_session_that_was_closed_meanwhile_has_no_digest(
    cluster: Cluster,
) -> None:
    await opened(cluster)
    running_turn = turn(cluster, 1, 2, 3)
    submit = await cluster.prefill.submitted()
    await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    complete = (await collect(running_turn)).complete
    assert complete is not None
    assert complete.history_digest == ""


async def test_a_turn_is_hashed_once_and_a_list_hashes_nothing(
    pairs: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counted(token_ids: array[int]) -> str:
        hashed.append(len(token_ids))
        return history_digest(token_ids)

    for place in ("sessions", "requests.output_stream"):
        monkeypatch.setattr(f"kvrelay.router.{place}.history_digest", counted)
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    assert (await state(pairs)).history_digest == DIGEST
    assert [length for length in hashed if length] == [5]


async def test_a_silent_worker_does_not_keep_an_answer_back(
    pairs: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_adoption, "_SECONDS", 3600.0)
    pairs.workers[1].finds = None
    pairs.workers[0].finds = {"": HISTORY}
    async with asyncio.timeout(60):
        assert (await adopt(pairs)).tokens == 5


@pytest.mark.parametrize(
    ("digest", "fields"),
    [("12-ab", {}), (DIGEST, {"history": pb.TokenIds(ids=[1])}), ("600" + DIGEST[1:], {})],
    ids=["no digest", "beside a history", "too long"],
)
async def test_what_cannot_be_is_refused_by_name(
    pairs: Cluster, digest: str, fields: dict[str, Any]
) -> None:
    error = await refused(pairs, digest, **fields)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("history_digest: ")
    assert not [one for worker in pairs.workers for one in worker.asked_for]


async def test_a_history_belongs_to_its_token(config: RouterConfig, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice-token-123456\nbobby-token-123456\n")
    async with running(replace(config, auth_token_file=tokens), "prefill-0", "decode-0") as cluster:
        cluster.count()
        alice, bob = (bearer(f"{name}-token-123456") for name in ("alice", "bobby"))
        request = pb.OpenSessionRequest(session_id="own")
        await cluster.stub.OpenSession(request, metadata=alice)
        params = pb.SamplingParams(max_tokens=2)
        first = pb.GenerateRequest(
            input_ids=pb.TokenIds(ids=[1, 2, 3]), session_id="own", sampling_params=params
        )
        async for _ in cluster.stub.Generate(first, metadata=alice):
            pass
        owner = cluster.decode.submits[0].session.owner
        cluster.decode.finds = {owner: HISTORY}
        error = await refused(cluster, metadata=bob)
        assert error.code() == grpc.StatusCode.NOT_FOUND
        [(asked, digest)] = cluster.decode.asked_for
        assert (asked != owner, digest) == (True, DIGEST)
        assert (await adopt(cluster, metadata=alice)).tokens == 5
