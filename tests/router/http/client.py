"""A client of the HTTP door of a router in front of scripted workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig

from ..cluster import Cluster, running

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def with_http(config: RouterConfig, folder: Path, **changes: Any) -> RouterConfig:
    """The configuration of a router that serves HTTP, with `TEMPLATE` for conversations."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return replace(config, http_address="127.0.0.1:0", chat_template=template, **changes)


@asynccontextmanager
async def counting(config: RouterConfig) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A router whose workers count, and a client of it."""
    async with (
        running(config, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client,
    ):
        cluster.count()
        yield cluster, client


def events(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should."""
    *chunks, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))
