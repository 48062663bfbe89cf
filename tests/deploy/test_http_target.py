"""How commands reach an OpenAI server over HTTP."""

from __future__ import annotations

import asyncio

from kvrelay.deploy.reach import http_target
from kvrelay.deploy.reach.grpc_target import CommandAccess
from kvrelay.deploy.reach.http_target import HttpTarget

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def test_idle_connections_are_closed_before_the_server_closes_them(monkeypatch):
    monkeypatch.setattr(http_target, "IDLE_CONNECTION_SECONDS", 0.05)
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with HttpTarget.parse(f"http://127.0.0.1:{port}").session(CommandAccess()) as session:
            async with session.get(f"http://127.0.0.1:{port}/") as response:
                assert await response.json(content_type=None) == {}
            async with asyncio.timeout(60):
                await closed.wait()
