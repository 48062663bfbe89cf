"""OpenAI's client: a chat with a tool, and a form."""

import json
from typing import Any

from asked import LOOK, MODEL, NAME, URL, River, tell, weather
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: str


TOOLS = [pydantic_function_tool(Weather, name="weather")]


def main(client: OpenAI, way: str) -> None:
    def ask(messages: list[Any], **changes: Any) -> Any:
        asked: Any = {"model": MODEL, "messages": messages, **changes}
        if way == "whole":
            return client.chat.completions.parse(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            message = stream.get_final_completion().choices[0].message
        assert "".join(pieces) == (message.content or ""), pieces
        return message

    messages: list[Any] = [{"role": "user", "content": LOOK}]
    said = ask(messages, tools=TOOLS)
    [call] = said.tool_calls
    tell(way, "thought", said.reasoning_content)
    tell(way, "call", json.loads(call.function.arguments))
    result = weather(call.function.parsed_arguments.city)
    answer = {"role": "tool", "tool_call_id": call.id, "content": result}
    tell(way, "answer", ask([*messages, said, answer], tools=TOOLS).content)
    tell(way, "river", ask([{"role": "user", "content": NAME}], response_format=River).parsed)


with OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60) as client:
    main(client, "whole")
    main(client, "streamed")
