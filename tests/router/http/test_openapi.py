"""The OpenAPI document, which the models that read the bodies make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from .client import CHAT, PROMPT

DOCUMENTED = Path(__file__).parents[3] / "docs" / "http-api.md"
WITH_BODIES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/sessions",
    "/tokenize",
    "/detokenize",
)


async def document(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/openapi.json")
    read: dict[str, Any] = answer.raise_for_status().json()
    return read


def bodies_of(document: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The schemas of a path's body: of each kind of it, if there are several."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = content["schema"]
    return [resolve(document, one) for one in schema.get("anyOf", [schema])]


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    [schema] = bodies_of(document, path)
    return schema


def resolve(document: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The schema that is referred to, with all that it refers to itself."""
    components = document["components"]
    name = reference["$ref"].removeprefix("#/components/schemas/")
    return {**components["schemas"][name], "components": components}


def named_in_the_page() -> set[str]:
    """The fields in the first column of the page's table of fields."""
    page = DOCUMENTED.read_text()
    table = page[page.index("| field | meaning |") :].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`([a-z_.]+)[^`]*`", row)}


async def test_each_field_of_the_page_is_in_the_document(shared_http: httpx.AsyncClient) -> None:
    told = await document(shared_http)
    bodies = [body_of(told, path)["properties"] for path in WITH_BODIES[:2]]
    for name in named_in_the_page():
        outer, _, inner = name.partition(".")
        shapes = [body[outer] for body in bodies if outer in body]
        assert shapes, name
        if inner:
            inside = [resolve(told, one["anyOf"][0])["properties"] for one in shapes]
            assert all(inner in properties for properties in inside), name


@pytest.mark.parametrize(
    ("path", "number", "base", "required"),
    [
        ("/v1/completions", 0, PROMPT, ["prompt"]),
        ("/v1/chat/completions", 0, CHAT, ["messages"]),
        ("/v1/sessions", 0, {}, []),
        ("/tokenize", 0, {"prompt": "x"}, ["prompt"]),
        ("/tokenize", 1, {"messages": CHAT["messages"]}, ["messages"]),
        ("/detokenize", 0, {"tokens": [1]}, ["tokens"]),
    ],
)
async def test_the_reader_knows_the_fields_of_the_document_and_no_others(
    shared_http: httpx.AsyncClient,
    path: str,
    number: int,
    base: dict[str, Any],
    required: list[str],
) -> None:
    told = await document(shared_http)
    schema = bodies_of(told, path)[number]
    known = {*schema["properties"], "prompt", "messages"}
    assert schema.get("required", []) == required
    every = [one["properties"] for each in WITH_BODIES for one in bodies_of(told, each)]
    for name in sorted({name for one in every for name in one} - {"prompt", "messages"}):
        answer = await shared_http.post(path, json={**base, name: {"a": {}}})
        unknown = f"{name}: is no field that this server knows" in answer.text
        assert unknown is (name not in known), (name, answer.text)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"temperature": None, "stop": None, "echo": None}, True),
        ({"stop": "a", "n": 2, "logit_bias": {"1": 3}}, True),
        ({"stop": ["a"], "stream": True, "stream_options": {"include_usage": True}}, True),
        ({"prompt": [[1, 2], "x"]}, True),
        ({"prompt": [1.0, 2]}, True),
        ({"prompt": [[1, 2.0], "x"]}, True),
        ({"prompt": [1.5]}, False),
        ({"prompt": [True]}, False),
        ({"prompt": [[]]}, False),
        ({"prompt": []}, False),
        ({"prompt": [-1]}, False),
        ({"stop": [1]}, False),
        ({"temperature": "hot"}, False),
        ({"echo": 1}, False),
        ({"use_beam_search": 0}, False),
        ({"n": 1.5}, False),
        ({"stream": True, "stream_options": {"a": 1}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, False),
        ({"response_format": {"type": "yaml"}}, False),
        ({"guided_json": []}, False),
        ({"nothing": 1}, False),
    ],
)
async def test_the_document_and_the_reader_agree(
    shared_http: httpx.AsyncClient, change: dict[str, Any], fits: bool
) -> None:
    schema = body_of(await document(shared_http), "/v1/completions")
    body = {**PROMPT, **change}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    answer = await shared_http.post("/v1/completions", json=body)
    assert (answer.status_code == 200) is fits, answer.text


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"messages": [{"role": "user", "content": ["x", {"text": "y"}]}]}, True),
        ({"messages": []}, False),
        ({"messages": [{"content": "x"}]}, False),
        ({"messages": [{"role": "user", "content": 3}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"role": "a", "tool_calls": [{}]}]}, False),
        ({"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": 0}}]}]}, False),
        ({"tools": [{"type": "function"}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 0}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
        ({"tool_choice": "never"}, False),
        ({"echo": True}, False),
    ],
)
async def test_the_document_and_the_reader_of_chats_agree(
    shared_http: httpx.AsyncClient, change: dict[str, Any], fits: bool
) -> None:
    schema = body_of(await document(shared_http), "/v1/chat/completions")
    body = {**CHAT, **change}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    answer = await shared_http.post("/v1/chat/completions", json=body)
    assert (answer.status_code == 200) is fits, answer.text


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({}, True),
        ({"session_id": "a/b", "idle_timeout_seconds": 2.5, "max_kept_tokens": 0}, True),
        ({"session_id": None}, True),
        ({"session_id": 5}, False),
        ({"idle_timeout_seconds": "long"}, False),
        ({"max_kept_tokens": -1}, False),
        ({"max_kept_tokens": 1.5}, False),
        ({"history": [1]}, True),
        ({"history": ["a"]}, False),
        ({"history_digest": 5}, False),
        ({"history_digest": ""}, False),
        ({"history_digest": "3-abc"}, False),
    ],
)
async def test_the_document_and_the_reader_of_sessions_agree(
    shared_http: httpx.AsyncClient, body: dict[str, Any], fits: bool
) -> None:
    schema = body_of(await document(shared_http), "/v1/sessions")
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    answer = await shared_http.post("/v1/sessions", json=body)
    assert (answer.status_code == 200) is fits, answer.text


async def test_each_path_of_sessions_is_in_the_document(shared_http: httpx.AsyncClient) -> None:
    paths = (await document(shared_http))["paths"]
    assert set(paths["/v1/sessions"]) == {"post", "get"}
    assert "requestBody" not in paths["/v1/sessions"]["get"]
    [(method, told)] = paths["/v1/sessions/{session}"].items()
    assert (method, told["parameters"][0]["name"]) == ("delete", "session")
    assert set(told["responses"]) >= {"200", "404"}


async def test_links_lead_to_an_operation_with_what_the_answer_has(
    shared_http: httpx.AsyncClient,
) -> None:
    told = await document(shared_http)
    opened = (await shared_http.post("/v1/sessions", json={})).raise_for_status()
    listed = (await shared_http.get("/v1/models")).raise_for_status()
    for path, method, answer in (("sessions", "post", opened), ("models", "get", listed)):
        links = told["paths"][f"/v1/{path}"][method]["responses"]["200"]["links"]
        [(parameter, link)] = links.items()
        next_path, next_method = (
            part.replace("~1", "/")
            for part in link["operationRef"].removeprefix("#/paths/").rsplit("/", 1)
        )
        parameters = told["paths"][next_path][next_method]["parameters"]
        assert [one["name"] for one in parameters] == [parameter]
        found: Any = answer.json()
        for step in link["parameters"][parameter].removeprefix("$response.body#/").split("/"):
            found = found[int(step)] if isinstance(found, list) else found[step]
        followed = next_path.replace(f"{{{parameter}}}", found)
        assert (await shared_http.request(next_method, followed)).status_code == 200


async def test_errors_have_the_documented_form(shared_http: httpx.AsyncClient) -> None:
    told = await document(shared_http)
    schema = told["components"]["schemas"]["Error"]
    for path, body in (("/v1/completions", {}), ("/v1/completions", {"model": "x", "prompt": "y"})):
        answer = await shared_http.post(path, json=body)
        assert str(answer.status_code) in told["paths"][path]["post"]["responses"]
        jsonschema.validate(answer.json(), schema)
