"""Instructor on the clients of OpenAI and Anthropic: a form in each of its modes."""

from typing import Any

import instructor
from anthropic import Anthropic
from asked import LOOK, MODEL, NAME, URL, River, tell
from openai import OpenAI
from pydantic import BaseModel


class weather(BaseModel):  # noqa: N801
    """Tell the weather of a city."""

    city: str


def main(client: Any, kind: str, form: type[BaseModel], prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": MODEL, "max_tokens": 200, "messages": messages, "response_model": form}
    tell("whole", kind, client.chat.completions.create(**asked))
    tell("streamed", kind, list(client.chat.completions.create_partial(**asked))[-1])


options: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": 60}
openai = OpenAI(base_url=f"{URL}/v1", **options)
by_tools = [
    instructor.from_openai(openai, mode=instructor.Mode.TOOLS),
    instructor.from_openai(openai, mode=instructor.Mode.TOOLS_STRICT),
    instructor.from_anthropic(Anthropic(base_url=URL, **options)),
]
for client in by_tools:
    main(client, "call", weather, LOOK)
    main(client, "river", River, NAME)
main(instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA), "river", River, NAME)
