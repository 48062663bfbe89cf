"""Sessions over HTTP: a body has the whole conversation, and its KV is found where it is."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.deploy.commands.conversation import Conversation
from kvrelay.deploy.reach.grpc_target import OPEN
from kvrelay.deploy.reach.http_target import HttpTarget
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.history_digest import history_digest

from ..cluster import Cluster, running
from ..scripted_worker import until


@pytest.fixture
async def cluster(http_config: RouterConfig) -> AsyncIterator[Cluster]:
    adaptive = replace(http_config, placement=PlacementMode.ADAPTIVE)
    async with running(adaptive, "decode-0", "decode-1") as cluster:
        cluster.count()
        yield cluster


async def complete(http: httpx.AsyncClient, ids: list[int], **fields: Any) -> list[int]:
    body = {"model": "counter", "prompt": ids, "max_tokens": 2, "return_token_ids": True, **fields}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    return list(answer["choices"][0]["token_ids"])


async def test_a_body_goes_on_where_its_beginning_was_computed(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    opened = (await http.post("/v1/sessions", json={"session_id": "a/b"})).raise_for_status()
    assert opened.json() == {"id": "a/b", "idle_timeout_seconds": 600.0, "tokens": 0}
    assert (await http.post("/v1/sessions", json={"session_id": "a/b"})).status_code == 409
    assert await complete(http, [1, 2, 3], session_id="a/b") == [4, 5]
    assert await complete(http, [1, 2, 3, 4, 5, 9], session_id="a/b") == [10, 11]
    assert await complete(http, [1, 2, 7], session_id="a/b") == [8, 9]  # edited
    [home] = [worker for worker in cluster.workers if worker.submits]
    assert [submit.cached_tokens for submit in home.submits] == [0, 4, 2]
    [session] = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
    assert (session.tokens, session.turns) == (5, 3)
    assert (await http.delete("/v1/sessions/a/b")).json() == {"id": "a/b", "deleted": True}
    await until(lambda: home.forgotten == [home.submits[0].session.session])
    assert (await http.delete("/v1/sessions/a/b")).status_code == 404


async def test_a_session_goes_on_by_its_history_or_its_digest(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    history = [1, 2, 3, 4, 5]
    digest = history_digest(array("I", history))
    for worker in cluster.workers:
        worker.finds = {"": history}
    for body in ({"history": history}, {"history_digest": digest}):
        opened = (await http.post("/v1/sessions", json=body)).raise_for_status()
        assert opened.json()["tokens"] == 5
    listed = (await http.get("/v1/sessions")).raise_for_status().json()["data"]
    assert [one["history_digest"] for one in listed] == [digest, digest]
    other = history_digest(array("I", [9]))
    unknown = await http.post("/v1/sessions", json={"history_digest": other})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].startswith("history_digest: ")
    both = await http.post("/v1/sessions", json={"history": history, "history_digest": digest})
    assert both.status_code == 400


@pytest.mark.parametrize("fields", [
    {"session_id": "unknown"}, {"session_id": 5}, {"session_id": None},
    {"session_id": "mine", "n": 2}, {"session_id": "mine", "cache_salt": "salt"},
])  # fmt: skip
async def test_a_call_that_cannot_be_a_turn_is_served_without(
    cluster: Cluster, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await http.post("/v1/sessions", json={"session_id": "mine"})
    assert await complete(http, [1, 2, 3], **fields) == [4, 5]
    submits = [submit for worker in cluster.workers for submit in worker.submits]
    assert submits
    assert not any(submit.HasField("session") for submit in submits)


async def test_several_prompts_are_no_turn(cluster: Cluster, http: httpx.AsyncClient) -> None:
    body = {"prompt": [[1, 2, 3], [4]], "session_id": "mine"}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
    assert not any(worker.submits for worker in cluster.workers)
    (await http.post("/v1/completions", json={**body, "session_id": None})).raise_for_status()


async def test_a_conversation_that_histories_have_no_room_for_is_served_without_its_session(
    http_config: RouterConfig,
) -> None:
    small = replace(http_config, placement=PlacementMode.ADAPTIVE, max_session_tokens=20)
    async with running(small, "decode-0") as cluster:
        cluster.count()
        async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http:
            for name in ("a", "b", "c"):
                await http.post("/v1/sessions", json={"session_id": name})
            for name in ("a", "b", "c"):
                assert await complete(http, [1] * 14 + [7], session_id=name) == [8, 9]
            assert [one.HasField("session") for one in cluster.workers[0].submits] == [
                True,
                False,
                False,
            ]
            listed = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
            assert [one.tokens for one in listed] == [17, 0, 0]
            assert await complete(http, [1, 2], session_id="b") == [3, 4], "as much as there is"
            assert await complete(http, [1, 2], session_id="a") == [3, 4]
            listed = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
            assert [one.tokens for one in listed] == [4, 4, 0]
            assert not any(one.running for one in listed)


async def test_a_salted_session_that_is_busy_lends_its_salt(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    message = pb.OpenSessionRequest(session_id="mine", cache_salt="secret")
    await cluster.stub.OpenSession(message)
    assert await complete(http, [1, 2, 3], session_id="mine") == [4, 5]
    assert await complete(http, [1, 2, 3], session_id="mine", n=2) == [4, 5]
    submits = [submit for worker in cluster.workers for submit in worker.submits]
    assert [submit.HasField("session") for submit in submits].count(True) == 1
    assert {submit.namespace for submit in submits} == {"/secret"}


async def test_a_list_of_sessions(cluster: Cluster, http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/sessions")).json() == {"object": "list", "data": []}
    for name in ("b", "a"):
        await http.post("/v1/sessions", json={"session_id": name, "idle_timeout_seconds": 60})
    await complete(http, [1, 2, 3], session_id="a")
    listed = (await http.get("/v1/sessions")).raise_for_status().json()["data"]
    assert [one["id"] for one in listed] == ["b", "a"]
    worker = listed[1].pop("worker")
    assert worker in {"decode-0", "decode-1"}
    assert 0 <= listed[1].pop("idle_seconds") < 60
    assert listed[1] == {
        "id": "a",
        "tokens": 5,
        "turns": 1,
        "running": False,
        "waiting_turns": 0,
        "idle_timeout_seconds": 60.0,
        "kept_tokens": 4,
        "history_digest": history_digest(array("I", [1, 2, 3, 4, 5])),
    }


async def test_a_bad_body_opens_nothing(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for body in ({"idle_timeout_seconds": 0}, {"max_kept_tokens": -1}, {"ttl": 5}):
        assert (await http.post("/v1/sessions", json=body)).status_code == 400, body
    assert not (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions


async def test_a_conversation_uses_a_session_and_closes_it(cluster: Cluster) -> None:
    target = HttpTarget.parse(f"http://{cluster.router.http_address}")
    conversation = Conversation({"max_completion_tokens": 8})
    conversation.model = "counter"
    async with target.session(OPEN) as session:
        await conversation.open_session(session, target.url)
        for message in ("on", "and on"):
            await conversation.ask(session, target.url, message, lambda text, reasoning: None)
        [state] = (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
        assert (state.session_id, state.turns) == (conversation.session_id, 2)
        await conversation.close_session(session, target.url)
    assert not (await cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
    [home] = [worker for worker in cluster.workers if worker.submits]
    assert home.submits[1].cached_tokens > 0
