"""How large an answer may become, and clients that do not take it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.answers import (
    CompletionAnswer,
    CompletionStyle,
    HeldAnswer,
    PromptPart,
    Shown,
    Whole,
    parts_of_whole,
)
from kvrelay.router.doors.http.logprobs_answer import TokenNames
from kvrelay.router.requests.events import ChoiceEnd, Completion, Delta, FinishReason
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.output import PhaseTimings

from ..cluster import Cluster
from ..scripted_worker import LENGTH, ScriptedWorker
from .client import (
    CHAT,
    HEAD,
    PROMPT,
    STREAM,
    connection,
    counting,
    events,
    until_closed,
)


@pytest.mark.parametrize("complete", [False, True])
async def test_a_client_that_does_not_read(http_config: RouterConfig, complete: bool) -> None:
    bounds = {"read_timeout": 0.3} if complete else {"max_unread_bytes": 1 << 20}
    top = [pb.TokenLogprob(token_id=n, logprob=-0.5) for n in range(20)]
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=top)] * 49
    async with counting(replace(http_config, **bounds)) as (cluster, _):
        cluster.prefill.on_submit = cluster.decode.on_submit = None
        async with connection(cluster, limit=1 << 10) as (_reader, writer):
            chat = {**CHAT, "max_tokens": 490, "n": 16, "logprobs": True, "top_logprobs": 20}
            body = json.dumps({**chat, "stream": True}).encode()
            writer.write(
                HEAD.replace(b"/completions", b"/chat/completions")
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
            submit = await cluster.prefill.submitted()
            for step in range(10):
                for choice in range(16):
                    cluster.prefill.say(
                        submit, 49 * step, (50,) * 49, logprobs=logprobs, choice=choice
                    )
            if complete:
                for choice in range(16):
                    cluster.prefill.say(submit, 490, choice=choice, end=LENGTH)
            async with asyncio.timeout(60):
                while not await cluster.metric("kvrelay_slow_readers_total"):
                    await asyncio.sleep(0.05)
        assert await cluster.metric("kvrelay_requests_total") == 1
        assert (await cluster.server_info()).live_requests == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 20},
        {"prompt": [list(range(400))] * 2, "echo": True, "logprobs": 20},
        {"prompt": [list(range(400))] * 2, "prompt_logprobs": 20},
        {"prompt": [list(range(400))] * 2, "return_token_ids": True},
    ],
    ids=["output", "echo", "prompt", "ids"],
)
async def test_a_whole_answer_has_a_bound(
    http_config: RouterConfig, fields: dict[str, Any]
) -> None:
    """The bound is that of as many streams."""
    config = replace(http_config, max_unread_bytes=1000)
    top = [pb.TokenLogprob(token_id=n, logprob=-0.5) for n in range(20)]
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=top)]
    async with counting(config) as (cluster, http):
        cluster.decode.on_submit = None

        async def prefill(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
            if submit.sampling_params.HasField("prompt_logprobs"):
                worker.say(submit, prompt_index=1, prompt_logprobs=logprobs * 399)
            worker.say(submit, 0, (50,) * 7, logprobs=logprobs * 7)

        cluster.prefill.on_submit = prefill
        async with asyncio.timeout(60):
            answer = await http.post("/v1/completions", json={**PROMPT, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        assert (await cluster.server_info()).live_requests == 0


LARGE = {"prompt": [[1, 2]] * 4, "n": 6, "max_tokens": 500, "logprobs": 20}


def say_much(cluster: Cluster) -> None:
    """Each choice has so many log-probabilities that `LARGE` is answered by megabytes."""
    top = [pb.TokenLogprob(token_id=n, logprob=-0.5) for n in range(20)]
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=top)]
    cluster.decode.on_submit = None

    async def prefill(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        for choice in range(submit.sampling_params.n):
            worker.say(submit, 0, (50,) * 500, logprobs=logprobs * 500, choice=choice, end=LENGTH)

    cluster.prefill.on_submit = prefill


async def test_a_large_answer_comes_in_parts(http_config: RouterConfig) -> None:
    async with counting(http_config) as (cluster, http):
        say_much(cluster)
        answer = await http.post("/v1/completions", json={**LARGE, "n": 4}, timeout=60)
        choices = answer.raise_for_status().json()["choices"]
        assert [one["index"] for one in choices] == list(range(16))
        assert all(len(one["logprobs"]["top_logprobs"]) == 500 for one in choices)
        assert len(answer.content) > 1 << 20
        assert answer.headers["transfer-encoding"] == "chunked"
        short = await http.post("/v1/completions", json={**LARGE, "n": 1, "logprobs": None})
        assert int(short.headers["content-length"]) == len(short.content)


async def test_a_client_that_does_not_read_a_large_answer(http_config: RouterConfig) -> None:
    async with counting(replace(http_config, read_timeout=0.3)) as (cluster, http):
        say_much(cluster)
        async with connection(cluster, limit=1 << 10) as (reader, writer):
            body = json.dumps(LARGE).encode()
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(60):
                while not await cluster.metric("kvrelay_slow_readers_total"):
                    await asyncio.sleep(0.05)
            assert not (await until_closed(reader)).endswith(b"0\r\n\r\n")
        (await http.post("/tokenize", json={"prompt": "x"})).raise_for_status()


async def test_a_client_that_leaves_with_a_call_in_the_pipeline(
    http_config: RouterConfig,
) -> None:
    async with counting(http_config) as (cluster, _):
        cluster.decode.on_submit = None
        async with connection(cluster) as (reader, writer):
            call = HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM
            writer.write(call + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(60):
            while (await cluster.server_info()).live_requests:
                await asyncio.sleep(0.05)


async def answer_of_1_0(cluster: Cluster, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Head and body of the answer to a client of HTTP/1.0."""
    async with connection(cluster) as (reader, writer):
        sent = json.dumps(body).encode()
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n" % len(sent)
        writer.write(head + sent)
        head, _, answer = (await until_closed(reader)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    return head, answer


async def test_a_client_that_knows_no_chunks(http_config: RouterConfig) -> None:
    async with counting(http_config) as (cluster, _):
        head, short = await answer_of_1_0(cluster, PROMPT)
        assert b"content-length: %d" % len(short) in head
        assert json.loads(short)["usage"]["completion_tokens"] == 8
        _, stream = await answer_of_1_0(cluster, {**PROMPT, "stream": True})
        pieces = [one["text"] for chunk in events(stream.decode()) for one in chunk["choices"]]
        assert "".join(pieces) == json.loads(short)["choices"][0]["text"]
        assert len(pieces) > 1
        say_much(cluster)
        head, large = await answer_of_1_0(cluster, {**LARGE, "n": 4})
        assert b"content-length" not in head
        assert len(json.loads(large)["choices"]) == 16


@pytest.mark.slow  # the tests before have both by themselves
async def test_a_client_that_knows_no_chunks_and_does_not_read(http_config: RouterConfig) -> None:
    async with counting(replace(http_config, read_timeout=0.3)) as (cluster, _):
        say_much(cluster)
        async with connection(cluster, limit=1 << 10) as (reader, writer):
            body = json.dumps(LARGE).encode()
            head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(60):
                while not await cluster.metric("kvrelay_slow_readers_total"):
                    await asyncio.sleep(0.05)
            assert not (await until_closed(reader)).endswith(b"}")


def test_a_whole_answer_is_made_choice_by_choice() -> None:
    """The event loop does other things between two of them."""
    names = TokenNames(None, as_ids=True)  # type: ignore[arg-type]
    answer, shown = CompletionAnswer(CompletionStyle(), "id", "model"), Shown(names)
    end = ChoiceEnd(FinishReason.LENGTH, None)
    wholes, completions = [], []
    for number in range(2):
        whole = Whole(answer, PromptPart(number * 3, 3, [1, 2]), shown, HeldAnswer(1 << 20))
        for choice in range(3):
            whole(Delta(0, (), f"text {choice}", choice))
        wholes.append(whole)
        completions.append(Completion((end,) * 3, 2, 3, 0, PhaseTimings(), 7))
    parts = list(parts_of_whole(answer, wholes, completions))
    assert len(parts) == 2 * 3 + 1
    texts = [one["text"] for one in json.loads(b"".join(parts))["choices"]]
    assert texts == [f"text {choice}" for choice in range(3)] * 2
