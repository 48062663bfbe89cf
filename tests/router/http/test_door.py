"""Who may come in by the HTTP door, and what it bears."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.net import receiving, tls
from kvrelay.net.tls import TlsFiles
from kvrelay.router.config import RouterConfig
from kvrelay.router.http import listener
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.certificates import Authority

from ..cluster import Cluster
from ..scripted_worker import LENGTH, ScriptedWorker
from .client import CHAT, PROMPT, counting, with_http

TOKENS = """
[[token]]
name = "alice"
token = "alpha"
max_live_requests = 1
max_queued_prompt_tokens = 3
[[token]]
name = "operator"
token = "omega"
rights = ["admin"]
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
STREAM = json.dumps({**PROMPT, "stream": True}).encode()


@pytest.fixture
def http_config(config: RouterConfig, tmp_path: Path) -> RouterConfig:
    return with_http(config, tmp_path)


@asynccontextmanager
async def connection(
    cluster: Cluster, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = str(cluster.router.http_address).rsplit(":", 1)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What came before the router hung up, which it does soon."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def is_served(http: httpx.AsyncClient) -> None:
    (await http.post("/v1/completions", json=PROMPT)).raise_for_status()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_tokens(http_config: RouterConfig, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with counting(replace(http_config, auth_token_file=path)) as (_, http):

        async def call(token: str | None, **change: Any) -> httpx.Response:
            headers = {} if token is None else bearer(token)
            return await http.post("/v1/completions", json={**PROMPT, **change}, headers=headers)

        for token in (None, "beta"):
            refused = await call(token)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models", headers=bearer(token or "x"))).status_code == 401
            assert (await http.get("/metrics", headers=bearer(token or "x"))).status_code == 401
        assert (await http.get("/health")).status_code == 200
        assert (await call("alpha")).status_code == 200
        lacking = await call("omega")
        assert (lacking.status_code, lacking.json()["error"]["type"]) == (403, "permission_error")
        assert (await http.get("/v1/models", headers=bearer("omega"))).status_code == 200
        assert (await http.get("/metrics", headers=bearer("alpha"))).status_code == 403
        assert (await http.get("/metrics", headers=bearer("omega"))).status_code == 200
        assert (await call("alpha", priority=-1)).status_code == 403
        limited = await call("alpha", prompt=[[1], [2]])
        assert (limited.status_code, limited.json()["error"]["param"]) == (400, "prompt")
        assert "max_live_requests" in limited.json()["error"]["message"]
        long = await call("alpha", prompt=[[1, 2, 3, 4]])
        assert (long.status_code, long.json()["error"]["param"]) == (400, "prompt")
        assert "max_queued_prompt_tokens" in long.json()["error"]["message"]
        twice = [("authorization", "Bearer alpha"), ("authorization", "Bearer alpha")]
        assert (await http.get("/v1/models", headers=twice)).status_code == 401


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


async def test_tls_and_a_certificate_that_is_replaced(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)
    before, after = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    files = before.issue()
    shown = TlsFiles(files.cert, files.key)
    async with counting(replace(http_config, front_tls=shown)) as (cluster, plain):
        url = f"https://{cluster.router.http_address}/health"
        with pytest.raises(httpx.TransportError):
            await plain.get("/health")
        async with httpx.AsyncClient(verify=trusting(before)) as http:
            assert (await http.get(url)).status_code == 200
        new = after.issue()
        files.cert.write_bytes(new.cert.read_bytes())
        files.key.write_bytes(new.key.read_bytes())
        async with httpx.AsyncClient(verify=trusting(after)) as http:
            assert (await http.get(url)).status_code == 200
        files.cert.write_text("no certificate")
        async with httpx.AsyncClient(verify=trusting(after)) as http:
            assert (await http.get(url)).status_code == 200


async def until_connections(cluster: Cluster, number: int) -> None:
    """Returns once so many are open at the door."""
    async with asyncio.timeout(10):
        while await cluster.metric("kvrelay_http_connections") != number:
            await asyncio.sleep(0.02)


def with_tls(config: RouterConfig, authority: Authority) -> RouterConfig:
    files = authority.issue()
    return replace(config, front_tls=TlsFiles(files.cert, files.key))


async def test_a_stop_does_not_wait_for_handshakes(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 3600.0)
    config = with_tls(http_config, Authority(tmp_path / "a"))
    async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
        async with counting(config) as (cluster, _):
            reader, writer = await stack.enter_async_context(connection(cluster))
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00")
            await until_connections(cluster, 1)
        assert await until_closed(reader) == b""


async def test_handshakes_without_end_make_room_for_others(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 3600.0)
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 3)
    authority = Authority(tmp_path / "a")
    async with contextlib.AsyncExitStack() as stack:
        cluster, _ = await stack.enter_async_context(counting(with_tls(http_config, authority)))
        url = f"https://{cluster.router.http_address}"
        client = httpx.AsyncClient(base_url=url, verify=trusting(authority))
        http = await stack.enter_async_context(client)
        await is_served(http)
        silent = [(await stack.enter_async_context(connection(cluster)))[0] for _ in range(6)]
        for reader in silent[:4]:
            assert await until_closed(reader) == b""
        assert not any(reader.at_eof() for reader in silent[4:])
        assert await cluster.metric("kvrelay_http_connections") == 3
        await is_served(http)
        async with httpx.AsyncClient(base_url=url, verify=trusting(authority)) as another:
            await is_served(another)
        assert await until_closed(silent[4]) == b""


async def test_handshakes_at_the_same_time_make_room_among_the_idle(
    http_config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 12)
    authority = Authority(tmp_path / "a")
    async with contextlib.AsyncExitStack() as stack:
        cluster, _ = await stack.enter_async_context(counting(with_tls(http_config, authority)))
        url = f"https://{cluster.router.http_address}"

        async def newcomer() -> None:
            client = httpx.AsyncClient(base_url=url, verify=trusting(authority))
            await is_served(await stack.enter_async_context(client))

        for _ in range(12):
            await newcomer()
        await asyncio.gather(*(newcomer() for _ in range(5)))


async def test_a_body_that_nobody_reads_ends_its_connection(
    http_config: RouterConfig, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    config = replace(http_config, auth_token_file=path)
    for head in (HEAD, HEAD.replace(b"completions", b"nothing")):
        async with counting(config) as (cluster, _), connection(cluster) as (reader, writer):
            writer.write(head + b"content-length: 100\r\n\r\n{")
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 40")


async def test_a_page_whose_name_points_at_this_machine(http_config: RouterConfig) -> None:
    named = replace(http_config, http_origins="https://chat.example:8443")
    async with counting(named) as (cluster, http):
        port = str(cluster.router.http_address).rsplit(":", 1)[1]
        for host, status in (
            (f"evil.example:{port}", 403),
            ("[", 403),
            ("chat.example", 200),
            (f"localhost:{port}", 200),
            ("[::1]:80", 200),
            (f"127.0.0.1:{port}", 200),
        ):
            headers = {"host": host, "origin": f"http://{host}"}
            if host == "chat.example":
                headers["origin"] = "https://chat.example:8443"
            answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
            assert answer.status_code == status, host


async def test_a_router_that_drains_is_not_healthy(http_config: RouterConfig) -> None:
    async with counting(replace(http_config, shutdown_grace_seconds=20.0)) as (cluster, http):
        cluster.decode.on_submit = None
        serving = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
        submit = await cluster.decode.submitted()
        assert (await http.get("/health")).status_code == 200
        stopping = asyncio.create_task(cluster.router.stop())
        async with asyncio.timeout(10):
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.05)
        cluster.decode.say(submit, 1, (5,) * 7, end=LENGTH)
        assert (await serving).status_code == 200
        await stopping


async def test_pages_of_other_origins(http_config: RouterConfig) -> None:
    here, there = "https://chat.example", "https://evil.example"
    async with counting(http_config) as (cluster, http):
        own = f"http://{cluster.router.http_address}"
        for origin, status in ((there, 403), ("null", 403), (own, 200)):
            answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": origin})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers
        assert len(cluster.prefill.submits) == 1
    async with counting(replace(http_config, http_origins=f"https://a.b, {here}")) as (_, http):
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": here})
        assert answer.headers["access-control-allow-origin"] == here
        asked = {"origin": here, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        assert (await http.options("/v1/completions", headers=asked)).status_code == 200
        asked["origin"] = there
        assert (await http.options("/v1/completions", headers=asked)).status_code == 400
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": there})
        assert answer.status_code == 403
    async with counting(replace(http_config, http_origins="*")) as (_, http):
        answer = await http.post("/v1/completions", json=PROMPT, headers={"origin": there})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("sent", [b"", HEAD, b"POST /v1/comp"])
async def test_a_head_that_does_not_arrive(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):
        writer.write(sent)
        assert await until_closed(reader) == b""
        await is_served(http)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (HEAD + b"x: ", b"y" * (1 << 16)),
        (HEAD, b"x: y\r\n" * (1 << 14)),
        (b"GET /", b"x" * (1 << 16)),
        (CHUNKED + b"0\r\n", b"a: b\r\n" * (1 << 14)),
        (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000),
        (b"", bytes(range(256)) * 256),
    ],
    ids=["header", "headers", "path", "trailers", "pipelined", "garbage"],
)
async def test_a_flood_is_hung_up_on(
    http_config: RouterConfig, begin: bytes, again: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):

        async def flood() -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(begin)
                while True:
                    writer.write(again)
                    await writer.drain()

        flooding = asyncio.create_task(flood())
        answered = await until_closed(reader)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        assert len(answered) < 64 << 10
        await is_served(http)


async def test_a_body_that_does_not_arrive(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "RECEIVE_SECONDS", 0.2)
    async with counting(http_config) as (cluster, http), connection(cluster) as (reader, writer):
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 408")
        await is_served(http)
        status = 'kvrelay_http_responses_total{model="counter",path="/v1/completions",status="408"}'
        assert await cluster.metric(status) == 1


async def test_a_body_more_than_are_taken_ends_the_oldest(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "MOST_RECEIVING", 2)
    head = HEAD + b"content-length: 100\r\n\r\n{"
    async with contextlib.AsyncExitStack() as stack:
        cluster, http = await stack.enter_async_context(counting(http_config))
        readers = []
        for _ in range(3):
            reader, writer = await stack.enter_async_context(connection(cluster))
            writer.write(head)
            readers.append(reader)
            await asyncio.sleep(0.05)
        assert (await until_closed(readers[0])).startswith(b"HTTP/1.1 408")
        await is_served(http)


async def test_the_longest_idle_connection_ends_for_a_new_one(
    http_config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 3)
    async with contextlib.AsyncExitStack() as stack:
        cluster, http = await stack.enter_async_context(counting(http_config))
        cluster.decode.on_submit = None
        busy, writer = await stack.enter_async_context(connection(cluster))
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM)
        assert (await busy.readline()).startswith(b"HTTP/1.1 200")
        idle = [(await stack.enter_async_context(connection(cluster)))[0] for _ in range(2)]
        await http.get("/health")
        assert await until_closed(idle[0]) == b""
        assert not idle[1].at_eof()
        assert not busy.at_eof()
        assert await cluster.metric("kvrelay_http_connections") == 3


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
            async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
            answer = await http.post("/v1/completions", json={**PROMPT, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        assert (await cluster.server_info()).live_requests == 0


LARGE = {"prompt": [[1, 2]] * 4, "n": 12, "max_tokens": 500, "logprobs": 20}


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
            async with asyncio.timeout(20):
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
        async with asyncio.timeout(10):
            while (await cluster.server_info()).live_requests:
                await asyncio.sleep(0.05)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = [
    "prompt",
    "messages",
    "model",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
    "return_token_ids",
    "priority",
    "cache_salt",
    "user",
    "metadata",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "guided_regex",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "tokens",
    "suffix",
]
PLAUSIBLE: dict[str, list[Any]] = {
    "prompt": [[1, 2], "hi", ["a", [3]], []],
    "messages": [CHAT["messages"], [{"role": "x", "content": [{"type": "text", "text": "a"}]}]],
    "n": [1, 3],
    "stream": [True, False],
    "echo": [True],
    "logprobs": [0, 2, True],
    "prompt_logprobs": [0, 1],
    "max_tokens": [1, 3],
    "tokens": [[1, 2]],
    "structured_outputs": [{"json": {}}, {"choice": ["a"]}, {"regex": "("}, {"grammar": "x"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
}
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2).flatmap(
    lambda body: st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(list(values)) for name, values in PLAUSIBLE.items()}
    ).map(lambda known: {**known, **body})
)


async def test_fuzzed_bodies(http_config: RouterConfig) -> None:
    """No body makes the router fail, and none leaves a request behind."""
    async with counting(http_config) as (cluster, http):
        loop = asyncio.get_running_loop()

        @settings(
            max_examples=150,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            body=BODIES,
            path=st.sampled_from(
                ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
            ),
        )
        def send(body: dict[str, Any], path: str) -> None:
            answer = asyncio.run_coroutine_threadsafe(
                http.post(path, content=json.dumps(body).encode()), loop
            ).result(30)
            assert answer.status_code in {200, 400, 404}, (answer.status_code, answer.text)
            assert "event: error" not in answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

        await asyncio.to_thread(send)
        assert (await cluster.server_info()).live_requests == 0
        await is_served(http)
