"""LiteLLM, whose providers are vLLM's and Anthropic's APIs: a chat with a tool, and a form."""

import json
from typing import Any

import litellm
from asked import CLAUDE, LOOK, MODEL, NAME, URL, River, tell, weather

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": weather.__doc__,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def main(way: str, model: str, base: str) -> None:
    def ask(messages: list[Any], **changes: Any) -> Any:
        asked = {"model": model, "api_base": base, "api_key": "any", "timeout": 60}
        made: Any = litellm.completion(
            messages=messages, stream=way == "streamed", **asked, **changes
        )
        if way == "streamed":
            made = litellm.stream_chunk_builder(list(made), messages=messages)
        return made.choices[0].message

    messages: list[Any] = [{"role": "user", "content": LOOK}]
    said = ask(messages, tools=[WEATHER])
    [call] = said.tool_calls
    if said.get("reasoning_content") is not None:
        tell(way, "thought", said.reasoning_content)
    arguments = json.loads(call.function.arguments)
    tell(way, "call", arguments)
    answer = {"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)}
    tell(way, "answer", ask([*messages, said, answer], tools=[WEATHER]).content)
    river = ask([{"role": "user", "content": NAME}], response_format=River)
    tell(way, "river", River.model_validate_json(river.content))


litellm.suppress_debug_info = True
for way in ("whole", "streamed"):
    main(way, f"hosted_vllm/{MODEL}", f"{URL}/v1")
    main(way, f"anthropic/{CLAUDE}", URL)
