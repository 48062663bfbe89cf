"""The page on compatibility says what is so: each of its fields and paths is tried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx

from kvrelay.net.door_rules import HTTP
from kvrelay.router.doors.http.protocol import ChatCompletionRequest, CompletionRequest

from .client import CHAT

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "compatibility.md").read_text()


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """Each name of a table, and what is said of it."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, _, here, _ = line.strip("|").split(" | ", 3)
            for name in re.findall("`([^`]+)`", names):
                yield name, here.strip()


FIELDS = dict(rows("Fields"))
PATHS = dict(rows("Paths"))
MEMBERS = {*ChatCompletionRequest.__pydantic_fields__, *CompletionRequest.__pydantic_fields__}


def test_served_fields_are_members_of_bodies() -> None:
    served = {name for name, here in FIELDS.items() if here != "refused"}
    assert len(served) > 60
    assert served <= MEMBERS
    told = PAGE + (DOCS / "http-api.md").read_text()
    assert not [name for name in MEMBERS if f"`{name}`" not in told]


async def test_refused_fields_are_named(shared_http: httpx.AsyncClient) -> None:
    """A field that some values of are served is refused with another one."""
    kinds = ("served", "no effect")
    refused = {name: here for name, here in FIELDS.items() if here not in kinds}
    assert len(refused) > 20
    for name, here in refused.items():
        is_of_completions = (
            here != "refused" and name not in ChatCompletionRequest.__pydantic_fields__
        )
        body = {"prompt": "x"} if is_of_completions else CHAT
        path = "/v1/completions" if is_of_completions else "/v1/chat/completions"
        answer = await shared_http.post(path, json={**body, name: {"x": 1}}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_paths_are_served_or_not(shared_http: httpx.AsyncClient) -> None:
    for call, here in PATHS.items():
        if here == "served":
            assert call in HTTP.methods
            continue
        method, path = call.split()
        answer = await shared_http.request(method, path, json={}, timeout=60)
        assert answer.status_code == 404, call
