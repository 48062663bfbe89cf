"""Pydantic AI's agents on both of OpenAI's APIs and on Anthropic's: a tool, and a form."""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from asked import CLAUDE, LOOK, MODEL, NAME, URL, River, tell, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def read(_context: Any, events: AsyncIterable[Any]) -> None:
    """A handler of events, with which an agent streams."""
    async for _event in events:
        pass


async def ask(way: str, agent: Any, prompt: str) -> tuple[Any, list[Any]]:
    """Return the output, and the parts of all messages."""
    run = await agent.run(prompt, event_stream_handler=read if way == "streamed" else None)
    return run.output, [part for message in run.all_messages() for part in message.parts]


def thought(part: ThinkingPart) -> str:
    """The Responses API has what is no summary as raw content."""
    raw: list[str] = (part.provider_details or {}).get("raw_content", [])
    return part.content + "".join(raw)


async def main(way: str, model: Any) -> None:
    answer, parts = await ask(way, Agent(model, tools=[weather]), LOOK)
    [call] = [part for part in parts if isinstance(part, ToolCallPart)]
    tell(way, "call", call.args_as_dict())
    tell(way, "answer", answer)
    for part in [part for part in parts if isinstance(part, ThinkingPart)]:
        tell(way, "thought", thought(part))
    for form in (NativeOutput(River), ToolOutput(River)):
        tell(way, "river", (await ask(way, Agent(model, output_type=form), NAME))[0])


async def all_of() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
    for way in ("whole", "streamed"):
        await main(way, OpenAIChatModel(MODEL, provider=openai))
        await main(way, OpenAIResponsesModel(MODEL, provider=openai))
        anthropic = AnthropicProvider(base_url=URL, api_key="any")
        await main(way, AnthropicModel(CLAUDE, provider=anthropic))


asyncio.run(all_of())
