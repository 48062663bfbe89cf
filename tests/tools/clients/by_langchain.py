"""LangChain's chat models of OpenAI's APIs and Anthropic's: a chat with a tool, and a form."""

from functools import reduce
from operator import add
from typing import Any

from asked import CLAUDE, LOOK, MODEL, NAME, URL, River, tell, weather
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def main(way: str, model: Any, forms: list[str]) -> None:
    def ask(asked: Any, messages: list[Any]) -> Any:
        if way == "whole":
            return asked.invoke(messages)
        return reduce(add, asked.stream(messages))

    tools = model.bind_tools([weather])
    messages: list[Any] = [HumanMessage(LOOK)]
    said = ask(tools, messages)
    [call] = said.tool_calls
    tell(way, "call", call["args"])
    for thought in [block.get("reasoning") for block in said.content_blocks]:
        if thought is not None:
            tell(way, "thought", thought)
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    tell(way, "answer", ask(tools, [*messages, said, result]).text)
    for form in forms:
        formed = model.with_structured_output(River, method=form)
        last = formed.invoke(NAME) if way == "whole" else list(formed.stream(NAME))[-1]
        tell(way, "river", last)


openai: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "any"}
responses = {**openai, "use_responses_api": True}
anthropic: dict[str, Any] = {"model": CLAUDE, "base_url": URL, "api_key": "any"}
thinking = {**anthropic, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
for way in ("whole", "streamed"):
    main(way, ChatOpenAI(**openai), ["json_schema", "function_calling", "json_mode"])
    main(way, ChatOpenAI(**responses), ["json_schema", "function_calling"])
    main(way, ChatAnthropic(**anthropic), ["json_schema", "function_calling"])
    main(way, ChatAnthropic(**thinking), ["json_schema"])
