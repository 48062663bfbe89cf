"""One streamed request over OpenAI's completions API, to any server that implements it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvrelay.deploy.load_generator.load_client import (
    OK,
    WRONG_OUTPUT,
    RequestRecord,
    RunClock,
    TokenLog,
)
from kvrelay.deploy.load_generator.workload import Job, Prompts

Body = dict[str, Any]
Prepare = Callable[[Body], Awaitable[Body]]
"""A step to take before a request is sent; it returns fields to add to the request."""

_DATA = b"data:"
_EVENT = b"event:"
_DONE = b"[DONE]"


class ResponseError(Exception):
    """An answer that is not the requested stream."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


def check_chunk(chunk: Body) -> None:
    """Raise `ResponseError` if a stream's chunk has an error instead of a choice."""
    if "error" in chunk:
        raise ResponseError(WRONG_OUTPUT, str(chunk["error"])[:200])


@dataclass
class _ChunkLog(TokenLog):
    """A recorder that counts a stream's tokens by the usage in its chunks, and checks its end.

    Where only the last chunk has usage, each chunk with text counts as one token until then.
    """

    usage: Body = field(default_factory=dict)
    finish_reason: str | None = None

    def take(self, chunk: Body, now: float) -> None:
        check_chunk(chunk)
        choices, usage = chunk["choices"], chunk.get("usage")
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage:
            self._take_usage(usage, now, has_text=bool(choices))
        elif any(choice.get("text") for choice in choices):
            self.take_tokens(1, now)

    def _take_usage(self, usage: Body, now: float, *, has_text: bool) -> None:
        self.usage = usage
        new = usage.get("completion_tokens", 0) - sum(self.counts)
        if new and self.counts and not has_text:
            self.counts[-1] += new  # told late: no token came now
        elif new:
            # A chunk without new tokens only flushes text that was held back, or ends the stream.
            self.take_tokens(new, now)

    def finish(self, now: float) -> RequestRecord:
        fault = self.wrong_length()
        if self.finish_reason != "length":
            fault = f"finished with {self.finish_reason}"
        details = self.usage.get("prompt_tokens_details") or {}
        cached_tokens = details.get("cached_tokens") or 0
        return self.record(now, WRONG_OUTPUT if fault else OK, fault, cached_tokens)


class CompletionsClient:
    """A client that sends jobs to `/v1/completions` under `base_url`, and reads server-sent events.

    A request that takes longer than ``deadline_s`` fails. ``prepare`` runs first and counts in the
    time to the first token: it is another server's work before this one's.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        prompts: Prompts,
        clock: RunClock,
        deadline_s: float,
        prepare: Prepare | None = None,
    ) -> None:
        self._session = session
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._prompts = prompts
        self._clock = clock
        self._deadline_s = deadline_s
        self._prepare = prepare

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end. A fault of the server is in the record."""
        body = completion_body(self._model, self._prompts.token_ids(job), job.output_len)
        log = _ChunkLog(job, self._clock.now())
        try:
            async with asyncio.timeout(self._deadline_s):
                if self._prepare is not None:
                    body |= await self._prepare(body)
                await self._read(body, log)
        except ResponseError as error:
            return log.record(self._clock.now(), error.status, error.detail)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            return log.record(self._clock.now(), type(error).__name__, str(error))
        return log.finish(self._clock.now())

    async def _read(self, body: Body, log: _ChunkLog) -> None:
        async with self._session.post(self._url, json=body) as response:
            await check_status(response)
            async for data in events_of(response):
                log.take(json.loads(data), self._clock.now())


def completion_body(model: str, token_ids: list[int], output_len: int) -> Body:
    """Make a greedy request of exactly `output_len` tokens: weights must not change the work."""
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """Return the name under which the server serves its model."""
    name: str = (await describe_model(session, base_url))["id"]
    return name


async def describe_model(session: aiohttp.ClientSession, base_url: str) -> Body:
    """Return the server's description of its first model; `ResponseError` if it has none."""
    async with session.get(f"{base_url}/v1/models") as response:
        await check_status(response)
        models: list[Body] = (await response.json())["data"]
    if not models:
        raise ResponseError("NO_MODEL", f"{base_url} serves no model")
    return models[0]


async def check_status(response: aiohttp.ClientResponse) -> None:
    """Raise `ResponseError`, with the answer's beginning, unless its status is 200."""
    if response.status != 200:
        raise ResponseError(f"HTTP_{response.status}", (await response.text())[:200])


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each event until the stream says that it is done.

    Raises ``ResponseError`` for an error event, and for a stream that ends earlier.
    """
    error = False
    async for line in response.content:
        if line.startswith(_EVENT):
            error = line[len(_EVENT) :].strip() == b"error"
        elif line.startswith(_DATA):
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                return
            if error:
                raise ResponseError(WRONG_OUTPUT, data[:200].decode(errors="replace"))
            yield data
    raise ResponseError(WRONG_OUTPUT, "the stream ended without [DONE]")
