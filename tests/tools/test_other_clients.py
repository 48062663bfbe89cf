"""Clients of other languages, and of Python, unchanged: a chat posted by each is answered alike."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
import requests
import urllib3

from tests.checkpoints import make_checkpoint
from tests.cluster.in_process import in_process

FOLDER: Final = Path(__file__).parent / "clients"
TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
CHAT: Final[dict[str, Any]] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Welcher Fluß? 🏞"}],
    "temperature": 0,
    "max_tokens": 12,
}
HEADERS: Final = {"content-type": "application/json"}
JSON_TYPE: Final = "content-type: application/json"

PROGRAMS: Final[dict[str, Sequence[str | Path]]] = {
    "curl": ("curl", "-sN", "-H", JSON_TYPE, "{url}", "-d", "{body}"),
    "curl, HTTP/2 asked for": ("curl", "-sN", "--http2", "-H", JSON_TYPE, "{url}", "-d", "{body}"),
}
"""Commands that print what is answered to a body posted to a URL."""
SLOW_PROGRAMS: Final[dict[str, Sequence[str | Path]]] = {
    "wget": ("wget", "-qO-", f"--header={JSON_TYPE}", "--post-data={body}", "{url}"),
    "perl": ("perl", FOLDER / "post.pl", "{url}", "{body}"),
    "tcl": ("tclsh", FOLDER / "post.tcl", "{url}", "{body}"),
    "node, fetch": ("node", FOLDER / "post.mjs", "fetch", "{url}", "{body}"),
    "node, http": ("node", FOLDER / "post.mjs", "http", "{url}", "{body}"),
    "java, HttpClient": ("java", FOLDER / "Post.java", "new", "{url}", "{body}"),
    "java, HttpURLConnection": ("java", FOLDER / "Post.java", "old", "{url}", "{body}"),
}


def by_urllib(url: str, body: bytes) -> bytes:
    call = urllib.request.Request(url, body, HEADERS)
    with urllib.request.urlopen(call, timeout=30) as answer:
        read: bytes = answer.read()
    return read


def by_http_client(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("POST", parts.path, body, HEADERS)
    read = connection.getresponse().read()
    connection.close()
    return read


def by_requests(url: str, body: bytes) -> bytes:
    with requests.post(url, body, headers=HEADERS, timeout=30, stream=True) as answer:
        return b"".join(answer.iter_content(None))


def by_urllib3(url: str, body: bytes) -> bytes:
    with urllib3.PoolManager() as pool:
        return pool.request("POST", url, body=body, headers=HEADERS, timeout=30).data


async def by_aiohttp(url: str, body: bytes) -> bytes:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=HEADERS) as it,
    ):
        return await it.read()


async def by_httpx(url: str, body: bytes) -> bytes:
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.post(url, content=body, headers=HEADERS)).content


Post = Callable[[str, bytes], Awaitable[bytes]]


def in_a_thread(post: Callable[[str, bytes], bytes]) -> Post:
    return lambda url, body: asyncio.to_thread(post, url, body)


LIBRARIES: Final[dict[str, Post]] = {
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    **{
        name: in_a_thread(post)
        for name, post in [
            ("urllib", by_urllib),
            ("http.client", by_http_client),
            ("requests", by_requests),
            ("urllib3", by_urllib3),
        ]
    },
}


def of_program(command: Sequence[str | Path]) -> Post:
    """A program that posts."""

    async def post(url: str, body: bytes) -> bytes:
        given = {"{url}": url, "{body}": body.decode()}
        arguments = [str(one) for one in command]
        for name, value in given.items():
            arguments = [one.replace(name, value) for one in arguments]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert process.returncode == 0
        return said

    return post


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    model = await asyncio.to_thread(make_checkpoint, tmp_path / "llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with in_process(model, prefill=0, decode=0, aggregated=1) as cluster:
        yield f"http://{cluster.router.http_address}/v1/chat/completions"
        await cluster.assert_at_baseline()


async def texts(post: Post, url: str) -> list[str]:
    """What the same chat is answered, whole and in a stream."""
    whole = json.loads(await post(url, json.dumps(CHAT).encode()))
    streamed = (await post(url, json.dumps({**CHAT, "stream": True}).encode())).decode()
    *events, done, end = streamed.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    return [whole["choices"][0]["message"]["content"], "".join(pieces)]


async def assert_alike(url: str, programs: dict[str, Sequence[str | Path]]) -> None:
    """Every library, and every program that is installed, is answered the same."""
    expected = await texts(by_httpx, url)
    assert expected[0] == expected[1] != ""
    posts = {name: of_program(one) for name, one in programs.items() if shutil.which(str(one[0]))}
    for name, post in (LIBRARIES | posts).items():
        assert await texts(post, url) == expected, name


async def test_clients_are_answered_alike(url: str) -> None:
    await assert_alike(url, PROGRAMS)


@pytest.mark.slow
async def test_clients_of_other_languages_are_answered_alike(url: str) -> None:
    await assert_alike(url, SLOW_PROGRAMS)
