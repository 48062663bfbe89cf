"""The `openai` client, unchanged, against real workers: whole answers, streams, tools, forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.in_process import in_process

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
MODEL = "tiny"


class River(pydantic.BaseModel):
    """What an output is to say: small, since the model has random weights."""

    name: Literal["Rhine", "Spree"]
    long: bool
    bridges: Annotated[list[Literal[1, 2, 3]], pydantic.Field(max_length=3)]


class FindRiver(River):
    """A function that the model is to call."""


@dataclass
class Said:
    """What a client was answered, twice: whole, and in a stream."""

    texts: list[str]
    rivers: list[River | None]
    calls: list[Any]


PLAIN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a river."}],
    "temperature": 0,
    "max_completion_tokens": 20,
}
FORMED: dict[str, Any] = {**PLAIN, "max_completion_tokens": 200, "response_format": River}
CALLING: dict[str, Any] = {
    **PLAIN,
    "max_completion_tokens": 300,
    "tools": [openai.pydantic_function_tool(FindRiver)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture
async def url(tmp_path: Any) -> AsyncIterator[str]:
    model = await asyncio.to_thread(make_checkpoint, tmp_path / "llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with in_process(model) as cluster:
        await cluster.assert_at_baseline()
        yield f"http://{cluster.router.http_address}/v1"
        await cluster.assert_at_baseline()


def called(completion: Any) -> Any:
    """The arguments of the only call of an answer."""
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == FindRiver.__name__
    return call.function.parsed_arguments


def by_sync(url: str) -> Said:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        text = chats.create(**PLAIN).choices[0].message.content
        chunks = list(chats.create(**PLAIN, stream=True))
        pieces = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        with chats.stream(**FORMED) as events:
            river = events.get_final_completion().choices[0].message.parsed
        with chats.stream(**CALLING) as events:
            call = called(events.get_final_completion())
        parsed = chats.parse(**FORMED).choices[0].message.parsed
        return Said([text or "", pieces], [parsed, river], [called(chats.parse(**CALLING)), call])


async def by_async(url: str) -> Said:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        text = (await chats.create(**PLAIN)).choices[0].message.content
        chunks = [chunk async for chunk in await chats.create(**PLAIN, stream=True)]
        pieces = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        async with chats.stream(**FORMED) as events:
            river = (await events.get_final_completion()).choices[0].message.parsed
        async with chats.stream(**CALLING) as events:
            call = called(await events.get_final_completion())
        parsed = (await chats.parse(**FORMED)).choices[0].message.parsed
        whole = called(await chats.parse(**CALLING))
        return Said([text or "", pieces], [parsed, river], [whole, call])


async def test_whole_or_streamed_sync_or_async_it_is_the_same(url: str) -> None:
    said = await by_async(url)
    assert said == await asyncio.to_thread(by_sync, url)
    assert said.texts[0] == said.texts[1] != ""
    assert said.rivers[0] == said.rivers[1]
    assert isinstance(said.rivers[0], River)
    assert said.calls[0] == said.calls[1]
    assert isinstance(said.calls[0], FindRiver)
