"""OpenAI's API over HTTP: what clients send and get, from the real router."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from kvrelay.deploy.load_generator.load_client import RunClock
from kvrelay.deploy.load_generator.openai_client import CompletionsClient, served_model
from kvrelay.deploy.load_generator.workload import Job, Prompts
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.doors.http import tokenizer_calls
from kvrelay.router.errors import StartError
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from ..cluster import Cluster
from ..scripted_worker import COUNTED, ScriptedWorker, until
from .client import CHAT, PROMPT, TEMPLATE, counting, events, text_of


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


async def test_the_usage_of_each_of_several_choices(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PROMPT, "n": 2, "stream": True, "stream_options": options}
    *chunks, usage = events((await http.post("/v1/completions", json=body)).text)
    last = {chunk["choices"][0]["index"]: chunk["usage"]["completion_tokens"] for chunk in chunks}
    assert last == {0: 8, 1: 8}
    assert usage["usage"]["completion_tokens"] == 16


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


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "verbosity": "low", "prompt_cache_retention": "24h"},
        {"stop": "", "functions": [], "function_call": "auto", "best_of": 1},
        {"reasoning_effort": "high", "cache_salt": "s"},
    ],
)
async def test_fields_without_effect_are_taken(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    (await http.post("/v1/chat/completions", json={**CHAT, **fields})).raise_for_status()


@pytest.mark.parametrize(("named", "told"), [([], None), ([400], 400), ([399], None)])
async def test_an_output_that_ends_by_itself_has_no_stop_reason(
    cluster: Cluster, http: httpx.AsyncClient, named: list[int], told: int | None
) -> None:
    async def say(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        reason = worker_pb2.RequestEnd.REASON_STOP
        end = worker_pb2.RequestEnd(reason=reason, matched_token_id=400)
        worker.say(submit, 0, (5, 400), end=end)

    cluster.prefill.on_submit = say
    body = {**PROMPT, "stop_token_ids": named}
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", told)
    streamed = events((await http.post("/v1/completions", json={**body, "stream": True})).text)
    assert streamed[-1]["choices"][0]["stop_reason"] == told


async def test_a_call_id_comes_back(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert (await http.get("/v1/models")).headers["x-request-id"]


async def test_the_model_and_the_small_paths(cluster: Cluster, http: httpx.AsyncClient) -> None:
    [model] = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("counter", "model", 512)
    assert Path(model["root"]) == cluster.router._config.model_path
    assert (await http.get("/v1/models/counter")).json() == model
    other = await http.get("/v1/models/other")
    error = other.json()["error"]
    assert (other.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'other'" in error["message"]
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/health")).status_code == 200
    metrics = await http.get("/metrics")
    assert "kvrelay_requests_total" in metrics.text
    assert (await http.head("/metrics")).headers["content-type"] == metrics.headers["content-type"]
    missing = await http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, None)
    assert (await http.get("/v1/completions")).status_code == 405
    assert (await http.head("/")).status_code == 200
    assert (await http.post("/v1/completions?beta=true", json=PROMPT)).status_code == 200


async def test_a_model_of_several_names(http_config: RouterConfig) -> None:
    async with counting(replace(http_config, model_aliases=("opus", "a/b"))) as (_, http):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["counter", "opus", "a/b"]
        assert (await http.get("/v1/models/a/b")).json() == listed[2]
        for asked, told in [(None, "counter"), ("counter", "counter"), ("a/b", "a/b")]:
            answer = await http.post("/v1/completions", json={**PROMPT, "model": asked})
            assert answer.json()["model"] == told
        tokens = await http.post("/tokenize", json={"prompt": "x", "model": "opus"})
        assert tokens.status_code == 200
        refused = (await http.post("/v1/completions", json={**PROMPT, "model": "c"})).json()
        assert "'counter', 'opus', 'a/b'" in refused["error"]["message"]


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


async def test_calls_are_aborted_by_the_id_that_their_client_gave(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.on_submit = None
    body = {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 8}
    calls = [
        asyncio.create_task(
            http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        )
        for request_id in ("mine", "mine", "other")
    ]
    await cluster.decode.submitted(6)

    async def abort(request_id: str) -> bool:
        answer = await cluster.stub.Abort(pb.AbortRequest(request_id=request_id))
        return bool(answer.aborted)

    assert not await abort("min")
    assert await abort("mine")
    for call in calls[:2]:
        choices = (await call).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert (await cluster.server_info()).live_requests == 2
    assert await abort("other")
    assert (await calls[2]).status_code == 200
    assert not await abort("mine")


async def test_requests_of_one_call_end_together(cluster: Cluster, http: httpx.AsyncClient) -> None:
    body = {"prompt": [[1, 2, 3], [402]], "max_tokens": 8}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    await until(lambda: bool(cluster.prefill.cancels or not cluster.prefill.submits))
    assert (await cluster.server_info()).live_requests == 0


async def test_an_error_in_mid_stream_is_an_event(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    """vercel/ai#19165, earendil-works/pi#8460, hermes-agent#102766: no silent end."""
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
        client = CompletionsClient(session, url, model, prompts, RunClock(), deadline_s=10)
        record = await client.send(job)
    assert (record.status, record.detail) == ("OK", "")
    assert sum(record.token_counts) == len(COUNTED)


async def test_a_port_in_use(http_config: RouterConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        router = Router(replace(http_config, http_address=address), StaticDiscovery([]))
        with pytest.raises(StartError, match="HTTP: cannot listen on"):
            await router.start()


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
        ("/detokenize", {}, "tokens"),
    ]
    for path, body, param in wrong:
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await http.post("/tokenize", json={"prompt": "x", "model": "y"})).status_code == 404


async def test_token_strings_are_made_in_a_thread_by_slices(
    http: httpx.AsyncClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, make = set(), tokenizer_calls._tokens_answer

    def seen(*args: Any) -> bytes:
        threads.add(threading.current_thread())
        return make(*args)

    monkeypatch.setattr(tokenizer_calls, "_tokens_answer", seen)
    for text in ("", "日本 " * 3000):
        body = {"prompt": text, "return_token_strs": True}
        told = (await http.post("/tokenize", json=body)).json()
        encoded = tokenizer.encode(text)
        assert (told["tokens"], told["token_strs"]) == (encoded.ids, encoded.tokens)
    assert len(told["tokens"]) > 2 * tokenizer_calls._SLICE
    assert threading.main_thread() not in threads
