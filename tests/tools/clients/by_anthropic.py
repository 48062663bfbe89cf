"""Anthropic's client: a message with a tool, and a form."""

from typing import Any

from anthropic import Anthropic
from asked import LOOK, MODEL, NAME, URL, River, tell, weather

WEATHER = {
    "name": "weather",
    "description": weather.__doc__,
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def main(client: Anthropic, way: str) -> None:
    def ask(messages: list[Any], **changes: Any) -> Any:
        asked: Any = {"model": MODEL, "max_tokens": 200, "messages": messages, **changes}
        if way == "whole":
            return client.messages.parse(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = "".join(stream.text_stream)
            message = stream.get_final_message()
        texts = [block.text for block in message.content if block.type == "text"]
        assert pieces == "".join(texts), pieces
        return message

    messages: list[Any] = [{"role": "user", "content": LOOK}]
    thinks = {"type": "enabled", "budget_tokens": 1024}
    said = ask(messages, tools=[WEATHER], thinking=thinks)
    thought, _, call = said.content
    tell(way, "thought", thought.thinking)
    tell(way, "call", call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    tell(way, "answer", ask(messages, tools=[WEATHER]).content[-1].text)
    river = ask([{"role": "user", "content": NAME}], output_format=River)
    tell(way, "river", river.parsed_output)


with Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=60) as client:
    main(client, "whole")
    main(client, "streamed")
