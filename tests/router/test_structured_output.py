"""What an output must be: read as clients say it, refused with its place, sent to both workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.router.admission.sampling_params import check_sampling_params
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import InvalidField
from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster
from .http.client import CHAT, PROMPT, counting, with_http

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
ANY_OBJECT = '{"type": "object"}'


@pytest.fixture
async def served(
    config: RouterConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    async with counting(with_http(config, tmp_path_factory.mktemp("template"))) as both:
        yield both


async def refused(cluster: Cluster, **params: Any) -> str:
    call = cluster.generate(**params)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


DEEP = '{"type":"object","properties":{"list":{"type":"array","items":{"uniqueItems":true}}}}'
IN_DEFINITION = '{"$defs":{"x":{"type":"foo"}},"properties":{"a":{"$ref":"#/$defs/x"}}}'
LENIENT = '{"x-guidance": {"lenient": true}, "uniqueItems": true}'
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": "{"}, "json_schema", "is no JSON schema"),
    ({"json_schema": DEEP}, "json_schema", '["uniqueItems"] at /properties/list/items'),
    ({"json_schema": IN_DEFINITION}, "json_schema", "Invalid type: foo at /$defs/x"),
    ({"json_schema": '{"not": {}}'}, "json_schema", "not"),
    ({"json_schema": LENIENT}, "json_schema", "uniqueItems"),
    ({"json_schema": '{"$ref": "http://a/b"}'}, "json_schema", "http://a/b"),
    ({"json_schema": "[" * 20_000}, "json_schema", "is no JSON schema"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"grammar": "root ::= missing"}, "grammar", "missing"),
    ({"grammar": 'start: "a" <|nothing|>'}, "grammar", "unknown special token"),
]


@pytest.mark.parametrize(("wanted", "form", "problem"), BAD)
async def test_a_grammar_that_cannot_be_used_is_refused_with_its_place(
    cluster: Cluster, wanted: dict[str, Any], form: str, problem: str
) -> None:
    details = await refused(cluster, structured_output=pb.StructuredOutput(**wanted))
    assert details.startswith(f"structured_output.{form}: ")
    assert problem in details
    assert "\n" not in details
    assert not cluster.prefill.submits
    assert not cluster.decode.submits
    label = f'kvrelay_grammars_refused_total{{form="{form}"'
    assert await cluster.metric(label) == 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"structured_output": pb.StructuredOutput()}, "structured_output"),
        ({"structured_output": pb.StructuredOutput(regex="a", grammar="b")}, "structured_output"),
        (
            {"structured_output": pb.StructuredOutput(choice=["a"] * 1025)},
            "structured_output.choice",
        ),
        ({"structured_output": pb.StructuredOutput(regex="a"), "ignore_eos": True}, "ignore_eos"),
        ({"structured_output": pb.StructuredOutput(regex="a"), "min_tokens": 2}, "min_tokens"),
    ],
)
async def test_what_is_out_of_bounds_is_refused(
    cluster: Cluster, params: dict[str, Any], field: str
) -> None:
    assert (await refused(cluster, **params)).startswith(f"{field}: ")
    assert not cluster.decode.submits


def test_the_bytes_of_a_grammar_are_bounded() -> None:
    params = pb.SamplingParams(structured_output=pb.StructuredOutput(regex="a" * MAX_GRAMMAR_BYTES))
    with pytest.raises(InvalidField, match="structured_output: must have at most 65536 bytes"):
        check_sampling_params(params, 100)


async def test_it_is_sent_to_both_workers_and_compiled_once(cluster: Cluster) -> None:
    cluster.count()
    wanted = pb.StructuredOutput(json_schema=SCHEMA_TEXT)
    for _ in range(2):
        async for _event in cluster.generate(structured_output=wanted):
            pass
    for worker in (cluster.prefill, cluster.decode):
        sent = [submit.sampling_params.structured_output for submit in worker.submits]
        assert sent == [wanted] * 2
    assert await cluster.metric("kvrelay_grammar_compile_seconds_count") == 1
    assert await cluster.metric("kvrelay_grammar_cache_hits_total") == 1


async def test_a_client_that_leaves_takes_no_grammar_from_others(cluster: Cluster) -> None:
    cluster.count()
    # It takes a while to compile.
    members = ",".join(f'"p{number}":{{"pattern":"^[a-z]{{1,9}}$"}}' for number in range(300))
    wanted = pb.StructuredOutput(json_schema=f'{{"properties":{{{members}}}}}')
    calls = [cluster.generate(structured_output=wanted) for _ in range(4)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    await asyncio.sleep(0.01)
    calls[0].cancel()
    for read in reads[1:]:
        assert (await read).HasField("delta")
    await asyncio.gather(*reads, return_exceptions=True)


SAID: list[tuple[dict[str, Any], pb.StructuredOutput]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        pb.StructuredOutput(json_schema=SCHEMA_TEXT),
    ),
    ({"response_format": {"type": "json_object"}}, pb.StructuredOutput(json_schema=ANY_OBJECT)),
    ({"structured_outputs": {"json": SCHEMA}}, pb.StructuredOutput(json_schema=SCHEMA_TEXT)),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, pb.StructuredOutput(json_schema=SCHEMA_TEXT)),
    ({"structured_outputs": {"json_object": True}}, pb.StructuredOutput(json_schema=ANY_OBJECT)),
    ({"structured_outputs": {"regex": "a+"}}, pb.StructuredOutput(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, pb.StructuredOutput(choice=["a", "b"])),
    ({"guided_json": SCHEMA}, pb.StructuredOutput(json_schema=SCHEMA_TEXT)),
    ({"guided_regex": "a+"}, pb.StructuredOutput(regex="a+")),
    ({"guided_choice": ["a", "b"]}, pb.StructuredOutput(choice=["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, pb.StructuredOutput(grammar='start: "a"')),
]


async def test_as_clients_say_it_over_http(served: tuple[Cluster, httpx.AsyncClient]) -> None:
    cluster, http = served
    for body, wanted in SAID:
        for path, base in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            (await http.post(path, json={**base, **body})).raise_for_status()
            assert cluster.decode.submits[-1].sampling_params.structured_output == wanted, body
    (await http.post("/v1/completions", json={**PROMPT, "response_format": {"type": "text"}}))
    assert not cluster.decode.submits[-1].sampling_params.HasField("structured_output")


REFUSED_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_json": {"type": "foo"}}, "guided_json"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]  # fmt: skip


async def test_a_refusal_over_http_names_the_member(
    served: tuple[Cluster, httpx.AsyncClient],
) -> None:
    cluster, http = served
    for body, param in REFUSED_BODIES:
        answer = await http.post("/v1/completions", json={**PROMPT, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    assert not cluster.decode.submits
