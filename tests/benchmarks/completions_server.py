"""A server of OpenAI's completions API that streams what it is told to.

python -m tests.benchmarks.completions_server PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

READY_LINE = "listening"


class ScriptedServer:
    """Streams completions as vLLM does, one token a chunk, unless told to do something wrong."""

    def __init__(self) -> None:
        self.fault = ""
        self.bodies: list[dict[str, Any]] = []
        self.base_url = ""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, shutdown_timeout=1)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "busy"}}, status=429)
        if not body["stream"]:
            return web.json_response({"kv_transfer_params": {"remote_port": 7}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(body):
            await response.write(event)
            await asyncio.sleep(0.001)
            if self.fault == "hang":
                await asyncio.sleep(60)
        return response

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        wanted = body["max_tokens"] - (self.fault == "short")
        events = [self._chunk(count, wanted) for count in range(1, wanted + 1)]
        if self.fault == "error event":
            events[1:] = [b'event: error\ndata: {"error": {"message": "lost"}}\n\n']
        if self.fault == "error data":
            events[1:] = [_data({"error": {"message": "lost"}})]
        if self.fault == "pairs":
            events = events[1::2]
        usage = {"completion_tokens": wanted, "prompt_tokens_details": {"cached_tokens": 3}}
        end = (
            []
            if self.fault == "cut"
            else [_data({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]
        )
        return [b": a comment\n\n", *events, *end]

    def _chunk(self, count: int, wanted: int) -> bytes:
        reason = "stop" if self.fault == "stop" else "length"
        choice = {"index": 0, "text": "", "finish_reason": reason if count == wanted else None}
        if self.fault == "late usage":
            return _data({"choices": [{**choice, "text": "x"}]})
        return _data({"choices": [choice], "usage": {"completion_tokens": count}})


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def _serve(port: int) -> None:
    server = ScriptedServer()
    await server.runner.setup()
    await web.TCPSite(server.runner, "127.0.0.1", port).start()
    print(READY_LINE, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
