"""An agent of openai-agents that calls a tool: writes its answer, whole and streamed."""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="any", timeout=60)
    model = OpenAIResponsesModel(model="counter", openai_client=client)
    agent = Agent(name="agent", instructions="Help.", tools=[weather], model=model)
    whole = await Runner.run(agent, "How is it in Köln?")
    run = Runner.run_streamed(agent, "How is it in Köln?")
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas).endswith(run.final_output), deltas
    sys.stdout.write(f"{whole.final_output}\n{run.final_output}\n")


asyncio.run(main(sys.argv[1]))
