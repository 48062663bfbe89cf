"""A conversation with a server of OpenAI's chat completions."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Protocol

import aiohttp

from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.openai_client import (
    ResponseError,
    check_chunk,
    check_status,
    events_of,
)


class WriteText(Protocol):
    """A function that takes a piece of an answer."""

    def __call__(self, text: str, *, reasoning: bool) -> None:
        """Show the piece."""


class Conversation:
    """The messages so far, and the options with which the next one is sent.

    Args:
        options: fields of each request, such as `temperature`.
        system: the first message, if there is one.
    """

    def __init__(self, options: dict[str, Any], system: str | None = None) -> None:
        self.model = ""
        self.session_id = ""
        """The id of the server's session, which keeps the KV of the messages; empty: there is none.
        """
        self.messages = [{"role": "system", "content": system}] if system else []
        self._options = options

    async def open_session(self, session: aiohttp.ClientSession, url: str) -> None:
        """Open a session, if the server has sessions: OpenAI's API has none."""
        with contextlib.suppress(aiohttp.ClientError, ValueError, KeyError):
            async with session.post(f"{url}/v1/sessions", json={}) as response:
                if response.ok:
                    self.session_id = str((await response.json())["id"])

    async def close_session(self, session: aiohttp.ClientSession, url: str) -> None:
        """Close the session; otherwise it expires."""
        if self.session_id:
            with contextlib.suppress(aiohttp.ClientError):
                await (await session.delete(f"{url}/v1/sessions/{self.session_id}")).release()

    async def ask(
        self, session: aiohttp.ClientSession, url: str, message: str, write: WriteText
    ) -> None:
        """Send a message with all previous ones, and write its answer as it comes.

        The received part of a cancelled answer stays in the conversation. A message without any
        answer does not.

        Raises:
            DeployError: the server refuses it, or fails.
        """
        asked = {"role": "user", "content": message}
        answer: list[str] = []
        body = {
            "model": self.model,
            "messages": [*self.messages, asked],
            "stream": True,
            **self._options,
        }
        if self.session_id:
            body["session_id"] = self.session_id
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await check_status(response)
                async for data in events_of(response):
                    self._take(json.loads(data), answer, write)
        except ResponseError as error:
            raise DeployError(str(error)) from error
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            raise DeployError(f"{url}: {str(error) or type(error).__name__}") from error
        finally:
            if answer:
                said = {"role": "assistant", "content": "".join(answer)}
                self.messages += [asked, said]

    @staticmethod
    def _take(chunk: dict[str, Any], answer: list[str], write: WriteText) -> None:
        check_chunk(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            # Reasoning is no part of the conversation: templates leave it out.
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                write(thought, reasoning=True)
            if text := delta.get("content"):
                answer.append(text)
                write(text, reasoning=False)
