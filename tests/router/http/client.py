"""A client of the HTTP door of a router in front of scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig
from tests.certificates import Authority

from ..cluster import Cluster, running

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
STREAM = json.dumps({**PROMPT, "stream": True}).encode()


def with_http(config: RouterConfig, folder: Path, **changes: Any) -> RouterConfig:
    """The configuration of a router that serves HTTP, with `TEMPLATE` for conversations."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return replace(config, http_address="127.0.0.1:0", chat_template=template, **changes)


@asynccontextmanager
async def counting(config: RouterConfig) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A router whose workers count, and a client of it."""
    async with (
        running(config, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client,
    ):
        cluster.count()
        yield cluster, client


def events(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should."""
    *chunks, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@asynccontextmanager
async def connection(
    cluster: Cluster, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the door, by which bytes are sent as they are."""
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
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def is_served(http: httpx.AsyncClient) -> None:
    (await http.post("/v1/completions", json=PROMPT)).raise_for_status()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))
