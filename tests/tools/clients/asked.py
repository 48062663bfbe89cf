"""What each program of a client asks a model that a worker plays, and how it tells the answers."""

import json
import sys

from pydantic import BaseModel

URL = sys.argv[1]
"""Of the HTTP door, without a path."""
MODEL = "counter"
CLAUDE = "claude-sonnet-4-5"
"""The same by a name of which clients know that it can hold to a form."""
LOOK = "How is it in Köln?"
NAME = "Name a river."


class River(BaseModel):
    """An output with a form."""

    name: str
    bridges: list[int]


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


def tell(way: str, kind: str, value: object) -> None:
    """Print what was answered.

    Args:
        way: "whole" or "streamed".
        kind: "call" with its arguments, "answer" with what the model says to a tool's result,
            "river", or "thought".
        value: what the client made of it.
    """
    said = value.model_dump() if isinstance(value, BaseModel) else value
    sys.stdout.write(json.dumps([way, kind, said]) + "\n")
