"""OpenAI's API over HTTP: what clients send and get, from the real router."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from benchmarks.client import Stopwatch
from benchmarks.openai_client import CompletionsClient, served_model
from benchmarks.workload import Job, Prompts
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.events import Delta
from kvrelay.router.http.answers import Answer, CompletionStyle, Held, PromptPart, Shown, Whole
from kvrelay.router.http.chat import read_chat
from kvrelay.router.http.errors import HttpError
from kvrelay.router.http.fields import Fields, parse_body
from kvrelay.router.http.logprobs import TokenNames
from kvrelay.router.router import Router
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.output import SampledToken

from .cluster import Cluster, running
from .http_client import CHAT, PROMPT, TEMPLATE, events, with_http
from .scripted_worker import COUNTED, HANDED_OVER, LENGTH, ScriptedWorker, counted, until


@pytest.fixture(scope="session")
def http_config(config: RouterConfig, tmp_path_factory: pytest.TempPathFactory) -> RouterConfig:
    return with_http(config, tmp_path_factory.mktemp("template"))


@pytest.fixture
async def cluster(http_config: RouterConfig) -> AsyncIterator[Cluster]:
    async with running(http_config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        yield client


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


async def test_a_completion_of_token_ids(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = (await http.post("/v1/completions", json=PROMPT)).raise_for_status()
    whole = Completion.model_validate(answer.json(), strict=True)
    assert whole.object == "text_completion"
    assert whole.choices[0].text == text_of(tokenizer, COUNTED)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 8)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_streamed_completion(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PROMPT, "stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == text_of(tokenizer, COUNTED)
    *reasons, reason = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (set(reasons), reason) == ({None}, "length")
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-2:]) == (True, [8, 8])
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 11


async def test_a_stream_has_no_usage_unless_asked(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert all("usage" not in chunk for chunk in events(answer.text))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(
    http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    body = {"prompt": ["ab", [1, 2, 3]], "max_tokens": 4, "n": 2, "stream": stream}
    answer = await http.post("/v1/completions", json=body)
    texts = [""] * 4
    ended = []
    for chunk in events(answer.text) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            ended += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(ended) == [0, 1, 2, 3]
    last = [tokenizer.encode("ab").ids[-1], 3]
    for prompt in range(2):
        for choice in range(2):
            ids = [(last[prompt] + 1 + i + 50 * choice) % 256 for i in range(4)]
            assert texts[2 * prompt + choice] == text_of(tokenizer, ids)


async def test_a_chat(cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = (await http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    whole = ChatCompletion.model_validate(answer.json())
    prompt = tokenizer.encode("<user>hi<bot>", add_special_tokens=False).ids
    assert list(cluster.prefill.submits[0].input_ids) == prompt
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    streamed = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in events(streamed.text)]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_chat_in_parts_that_goes_on(cluster: Cluster, http: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "I am "}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    tokenizer = Tokenizer.from_file(str(cluster.router._config.model_path / "tokenizer.json"))
    told = tokenizer.decode(list(cluster.prefill.submits[0].input_ids))
    assert told == "<user>a\nb<assistant>I am "


async def test_the_parameters_come_to_the_workers(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    numbers = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5}
    numbers |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "top_k": 7, "seed": 5}
    rules = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7], "stop": "zz", "n": 2}
    ignored: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "logit_bias": {"9": -100},
        "suffix": None,
    }
    ignored |= {"length_penalty": 1.0, "use_beam_search": False, "bad_words": []}
    body = {**PROMPT, **numbers, **rules, **ignored, "model": "counter", "priority": 3}
    (await http.post("/v1/completions", json=body)).raise_for_status()
    submit = cluster.prefill.submits[0]
    params = submit.sampling_params
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert (params.n, params.min_tokens, params.ignore_eos, submit.priority) == (2, 2, True, 3)
    assert (list(params.stop), list(params.stop_token_ids)) == (["zz"], [7])
    assert dict(params.logit_bias) == {9: -100}


async def test_a_call_id_comes_back(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert (await http.get("/v1/models")).headers["x-request-id"]


async def test_the_model_and_the_small_paths(cluster: Cluster, http: httpx.AsyncClient) -> None:
    [model] = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("counter", "model", 512)
    assert Path(model["root"]) == cluster.router._config.model_path
    assert (await http.get("/v1/models/counter")).json() == model
    assert (await http.get("/v1/models/other")).status_code == 404
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/health")).status_code == 200
    metrics = await http.get("/metrics")
    assert "kvrelay_requests_total" in metrics.text
    assert (await http.head("/metrics")).headers["content-type"] == metrics.headers["content-type"]
    missing = await http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, None)
    assert (await http.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [1 << 40]}, 400, "prompt"),
        ({"prompt": [402]}, 400, "prompt"),
        ({"prompt": [1, "x"]}, 400, "prompt"),
        ({"prompt": ["x"] * 257}, 400, "prompt"),
        ({"prompt": "x" * 600}, 400, "prompt"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": "x", "model": 3}, 400, "model"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "temperature": 1e300}, 400, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "x", "n": 17}, 400, "n"),
        ({"prompt": "x", "n": -1}, 400, "n"),
        ({"prompt": "x", "n": True}, 400, "n"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
        ({"prompt": "x", "stop": [1]}, 400, "stop"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, 400, "stream_options.a"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": "x", "guided_json": {}}, 400, "guided_json"),
        ({"prompt": "x", "bad_words": ["y"]}, 400, "bad_words"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of"),
        ({"prompt": "x", "cache_salt": "s" * 129}, 400, "cache_salt"),
    ],
)
async def test_a_refusal_names_the_field(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_a_refused_chat(http: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 30_000],
)
async def test_what_is_no_json_object(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body")
    assert "connection" not in answer.headers


async def test_a_body_that_is_too_large(http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 1024

    for content in (b" " * (65 << 10), pieces()):
        answer = await http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("piece", [b"[],", b"1,", b'{"a":1},', b'{"a" :1},'])
async def test_a_body_of_too_many_parts(config: RouterConfig, piece: bytes) -> None:
    large = replace(config, http_address="127.0.0.1:0", max_message_bytes=16 << 20)
    async with (
        running(large, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
    ):
        body = b'{"prompt": [' + piece * (1 << 18 if b":" in piece else 1 << 20) + b"1]}"
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 413
        assert "elements" in answer.json()["error"]["message"]


def test_a_number_of_many_digits_is_not_parsed() -> None:
    assert parse_body(b'{"a": %s}' % (b"7" * 300)) == {"a": int("7" * 300)}
    with pytest.raises(HttpError, match="digits"):
        parse_body(b'{"a": %s}' % (b"7" * 1000))
    assert int("7" * 1000)


def test_all_of_a_chat_counts_as_text() -> None:
    template = ChatTemplate(TEMPLATE, {})
    body = {"messages": [{"role": "a" * 1000, "content": "b"}]}
    texts: Any = None
    assert read_chat(Fields(body), 1040, texts, template).num_bytes == 1040


async def test_a_chat_without_a_template(config: RouterConfig) -> None:
    plain = replace(config, http_address="127.0.0.1:0")
    async with (
        running(plain, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_a_client_that_leaves_ends_its_requests(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.on_submit = None
    for stream in (True, False):
        number = len(cluster.decode.submits) + 1
        body = {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 8, "stream": stream}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await cluster.decode.submitted(number + 1)
        assert not cluster.decode.cancels[number - 1 :]
        call.cancel()
        await until(lambda wanted=number + 1: len(cluster.decode.cancels) >= wanted)  # type: ignore[misc]
        assert (await cluster.server_info()).live_requests == 0
    assert await cluster.metric("kvrelay_requests_total") == 4


async def test_requests_of_one_call_end_together(cluster: Cluster, http: httpx.AsyncClient) -> None:
    body = {"prompt": [[1, 2, 3], [402]], "max_tokens": 8}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    await until(lambda: bool(cluster.prefill.cancels or not cluster.prefill.submits))
    assert (await cluster.server_info()).live_requests == 0


async def test_an_error_in_mid_stream_is_an_event(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.on_submit = None
    async with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as answer:
        lines = answer.aiter_lines()
        assert "choices" in await anext(lines)
        await cluster.router.stop()
        rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == (
        "service_unavailable_error",
        "the router is stopping",
    )


async def test_an_error_before_the_first_token_has_its_status(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    for worker in cluster.workers:
        worker.on_submit = None
    body = {**PROMPT, "stream": True}
    timeout = {"x-request-timeout-ms": "200"}
    late = await http.post("/v1/completions", json=body, headers=timeout)
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    await cluster.decode.stop()
    await cluster.until_lost("decode-0")
    lost = await http.post("/v1/completions", json=body)
    assert lost.status_code == 503


async def test_too_many_requests_are_told_when_to_try_again(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.on_submit = None
    waiting = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
    await cluster.prefill.submitted()
    answer = await http.post("/v1/completions", json={"prompt": [[1]] * 8, "max_tokens": 1})
    waiting.cancel()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["retry-after-ms"] == "500"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
        ({"max_completion_tokens": 10**8}, "max_completion_tokens"),
        ({"max_tokens": 10**8}, "max_tokens"),
    ],
)
async def test_a_refused_chat_parameter_has_the_clients_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": CHAT["messages"], **fields}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["param"], error["message"].split(":")[0]) == (param, param)


async def test_more_prompts_than_may_be_live_are_never_begun(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [[1]] * 9, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert not cluster.prefill.submits
    assert await cluster.metric('kvrelay_requests_total{model="counter",outcome="invalid"}') == 1
    assert await cluster.metric('kvrelay_door_requests_total{door="http"') == 1


async def test_the_openai_client(cluster: Cluster, tokenizer: Tokenizer) -> None:
    base = f"http://{cluster.router.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["counter"]
        whole = await client.completions.create(model="counter", prompt=[1, 2, 3], max_tokens=8)
        assert whole.choices[0].text == text_of(tokenizer, COUNTED)
        assert whole._request_id
        stream = await client.chat.completions.create(
            model="counter",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="counter", prompt="x", temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")


async def test_the_client_that_compares_us_with_others(cluster: Cluster) -> None:
    url = f"http://{cluster.router.http_address}"
    job = Job(index=0, input_len=3, output_len=len(COUNTED))
    async with aiohttp.ClientSession() as session:
        prompts = Prompts(vocab_size=4, seed=(0,))
        model = await served_model(session, url)
        client = CompletionsClient(session, url, model, prompts, Stopwatch(), deadline_s=10)
        record = await client.send(job)
    assert (record.status, record.detail) == ("OK", "")
    assert sum(record.token_counts) == len(COUNTED)


async def test_a_port_in_use(http_config: RouterConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        router = Router(replace(http_config, http_address=address), StaticDiscovery([]))
        with pytest.raises(StartError, match="HTTP: cannot listen on"):
            await router.start()


def test_each_field_is_taken_once() -> None:
    fields = Fields({"a": 1, "b": None})
    assert fields.integer("a", 0, 2) == 1
    assert fields.text("b") is None
    fields.finish()


def scored(cluster: Cluster) -> None:
    """From now on the workers give log-probabilities, of the prompt, too."""

    async def prefill(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        params, ids = submit.sampling_params, list(submit.input_ids)
        fields: dict[str, Any] = {}
        if params.HasField("prompt_logprobs"):
            worker.say(submit, prompt_index=1, prompt_logprobs=[scores(one) for one in ids[1:]])
        fields["logprobs"] = [scores(counted(submit, 0))] if params.HasField("logprobs") else []
        end = LENGTH if params.max_tokens == 1 else HANDED_OVER
        for choice in range(max(params.n, 1)):
            worker.say(submit, 0, (counted(submit, 0),), choice=choice, end=end, **fields)

    async def decode(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        for position in range(1, submit.sampling_params.max_tokens):
            token, fields = counted(submit, position), {}
            if submit.sampling_params.HasField("logprobs"):
                fields["logprobs"] = [scores(token)]
            if position == submit.sampling_params.max_tokens - 1:
                fields["end"] = LENGTH
            worker.say(submit, position, (token,), **fields)

    cluster.prefill.on_submit, cluster.decode.on_submit = prefill, decode


def scores(token_id: int) -> pb.TokenLogprobs:
    """A token is the second likeliest, after the one before it."""
    top = [
        pb.TokenLogprob(token_id=token_id - 1, logprob=-0.25),
        pb.TokenLogprob(token_id=token_id, logprob=-0.3),
    ]
    return pb.TokenLogprobs(token_id=token_id, logprob=-0.3, top=top)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_likelihoods_as_lm_eval_reads_them(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    scored(cluster)
    prompt = [10, 20, 30]
    body = {"prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": True, "stream": stream}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status()
    chunks = events(answer.text) if stream else [answer.json()]
    choice = chunks[0]["choices"][0]
    shown = choice["logprobs"]
    ids = [*prompt, 31]
    assert choice["text"] == text_of(tokenizer, ids)
    assert shown["tokens"] == [text_of(tokenizer, [one]) for one in ids]
    assert shown["token_logprobs"] == [None] + [float(np.float32(-0.3))] * 3
    assert shown["top_logprobs"][0] is None
    for token, logprob, top in zip(
        shown["tokens"][1:], shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob
        assert max(top.values()) == -0.25
        assert len(top) == 2
    lengths = [len(token) for token in shown["tokens"]]
    assert shown["text_offset"] == [sum(lengths[:i]) for i in range(4)]
    assert all(not chunk["choices"][0]["text"] for chunk in chunks[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_in_a_chat(
    cluster: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    scored(cluster)
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "stream": stream}
    answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    chunks = events(answer.text) if stream else [answer.json()]
    content = []
    for chunk in chunks:
        kind = ChatCompletionChunk if stream else ChatCompletion
        logprobs = kind.model_validate(chunk).choices[0].logprobs
        content += (logprobs.content if logprobs is not None else None) or []
    assert len(content) == 4
    first = content[0]
    assert first.logprob == float(np.float32(-0.3))
    assert bytes(first.bytes or []).decode() == first.token
    [top] = first.top_logprobs
    assert (ord(top.token), top.logprob) == (ord(first.token) - 1, -0.25)


async def test_log_probabilities_of_the_prompt_in_vllms_form(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    scored(cluster)
    body = {"prompt": [10, 20], "max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["19"]["rank"] == 1
    assert (second["20"]["rank"], second["20"]["logprob"]) == (None, float(np.float32(-0.3)))
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([10, 20], [21])
    chat = (await http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    assert chat["prompt_token_ids"] == list(cluster.prefill.submits[-1].input_ids)
    assert len(chat["choices"][0]["token_ids"]) == 4
    refused = await http.post("/v1/completions", json={**body, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_said_of_a_prompt_is_said_once(
    cluster: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    scored(cluster)
    body = {"prompt": [[10, 20], [5]], "max_tokens": 1, "n": 3, "return_token_ids": True}
    body |= {"stream": True} if stream else {"prompt_logprobs": 1}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status()
    chunks = events(answer.text) if stream else [answer.json()]
    told = {
        (choice["index"], tuple(choice["prompt_token_ids"]))
        for chunk in chunks
        for choice in chunk["choices"]
        if "prompt_token_ids" in choice
    }
    assert told == {(0, (10, 20)), (3, (5,))}
    if not stream:
        shown = ["prompt_logprobs" in choice for choice in chunks[0]["choices"]]
        assert shown == [True, False, False] * 2


async def test_an_echoed_prompt_is_in_each_choice(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    scored(cluster)
    body = {"prompt": [10, 20], "max_tokens": 1, "n": 3, "logprobs": 1, "echo": True}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status()
    choices = answer.json()["choices"]
    of_prompt = [
        {name: values[:2] for name, values in choice["logprobs"].items()} for choice in choices
    ]
    assert of_prompt[0] == of_prompt[1] == of_prompt[2]
    assert all(len(values) == 3 for values in choices[2]["logprobs"].values())


def test_an_echoed_prompt_is_written_once_for_all_choices() -> None:
    names: list[int] = []

    class Texts:
        def text_of(self, token_id: int) -> str:
            names.append(token_id)
            return str(token_id)

    answer, held = Answer(CompletionStyle(), "x", "m"), Held(1 << 20)
    shown = Shown(TokenNames(Texts(), as_ids=False), logprobs=0, echo=True)  # type: ignore[arg-type]
    whole = Whole(answer, PromptPart(0, 16, range(100)), shown, held)
    names.clear()
    whole(Delta(0, (), "", prompt_logprobs=tuple(SampledToken(n, -0.5) for n in range(1, 100))))
    assert len(names) == 2 * 99


async def test_streamed_token_ids_and_their_names(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    scored(cluster)
    body = {**PROMPT, "stream": True, "return_token_ids": True, "logprobs": 0}
    answer = await http.post(
        "/v1/completions", json={**body, "return_tokens_as_token_ids": True, "max_tokens": 2}
    )
    choices = [chunk["choices"][0] for chunk in events(answer.text)]
    assert choices[0]["prompt_token_ids"] == [1, 2, 3]
    ids = [one.get("token_ids", []) for one in choices]
    assert list(itertools.chain(*ids)) == [4, 5]
    shown = [one["logprobs"]["tokens"] for one in choices if one["logprobs"]]
    assert list(itertools.chain(*shown)) == ["token_id:4", "token_id:5"]


async def test_tokenize_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "日本 <|end|>"
    told = (await http.post("/tokenize", json={"prompt": text, "model": "counter"})).json()
    assert told["tokens"] == tokenizer.encode(text).ids
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
    back = await http.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": text}
    chat = (await http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert chat["tokens"] == tokenizer.encode("<user>hi<bot>").ids
    info = (await http.get("/tokenizer_info")).json()
    assert info["chat_template"] == TEMPLATE
    assert info["eos_token"] is None
    wrong = [
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [402]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ]
    for path, body, param in wrong:
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await http.post("/tokenize", json={"prompt": "x", "model": "y"})).status_code == 404
