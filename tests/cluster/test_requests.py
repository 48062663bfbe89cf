"""What a client can ask for, answered by a running 1P1D cluster."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import grpc
import openai
import pydantic
import pytest
from click.testing import CliRunner

from kvrelay.deploy.cli import main
from kvrelay.v1 import inference_pb2
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import InProcess, in_process

PROMPT = list(range(20, 60))
FINISH = inference_pb2.FinishReason
SECONDS = 60


@pytest.fixture(scope="module")
async def cluster(tiny, tmp_path_factory) -> AsyncIterator[InProcess]:
    """A pool of 1024 tokens beside a model of 4096, so that either can be what is too small."""
    page_bytes = 3 * 2 * 2 * 16 * 16 * 4
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    async with in_process(
        tiny,
        kv_memory=64 * page_bytes,
        chunk_tokens=32,
        chat_template=template,
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
async def everything_comes_back(cluster) -> AsyncIterator[None]:
    yield
    await cluster.assert_at_baseline()


async def test_greedy_repeats_itself(cluster):
    answers = [await cluster.generate(PROMPT, temperature=0, max_tokens=20) for _ in range(2)]
    assert answers[0].tokens == answers[1].tokens


async def test_seed_decides_the_sample(cluster):
    def ask(seed: int):
        return cluster.generate(PROMPT, temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True)

    first, again, other = [await ask(seed) for seed in (7, 7, 8)]
    assert first.tokens == again.tokens != other.tokens
    assert first.complete.seed == 7


async def test_drawn_seed_is_told_and_reproduces(cluster):
    drawn = await cluster.generate(PROMPT, temperature=1.5, max_tokens=24, ignore_eos=True)
    again = await cluster.generate(
        PROMPT, temperature=1.5, max_tokens=24, ignore_eos=True, seed=drawn.complete.seed
    )
    assert drawn.tokens == again.tokens


async def test_sample_does_not_depend_on_company(cluster):
    """vllm-project/vllm#51226."""

    def ask():
        return cluster.generate(PROMPT, temperature=1.2, seed=5, max_tokens=16, ignore_eos=True)

    alone = await ask()
    together = await asyncio.gather(*(ask() for _ in range(6)))
    assert {tuple(answer.tokens) for answer in together} == {tuple(alone.tokens)}


async def test_length_usage_and_timings(cluster):
    answer = await cluster.generate(PROMPT, temperature=0, max_tokens=10, ignore_eos=True)
    complete = answer.complete
    assert len(answer.tokens) == 10
    assert complete.finish_reason == FINISH.FINISH_REASON_LENGTH
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (40, 10)
    timings = complete.timings
    for phase in ("queue", "prefill", "transfer", "decode"):
        assert getattr(timings, f"{phase}_seconds") > 0, phase


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_first_token_may_be_the_last(cluster, max_tokens):
    answer = await cluster.generate(PROMPT, temperature=0, max_tokens=max_tokens, ignore_eos=True)
    assert len(answer.tokens) == max_tokens
    assert answer.complete.finish_reason == FINISH.FINISH_REASON_LENGTH


@pytest.mark.parametrize("place", [0, 5])
async def test_stop_token_ends_it(cluster, place):
    """The first token, too: vllm-project/vllm#46008, sgl-project/sglang#12151.

    NVIDIA/TensorRT-LLM#16691 is of the same.
    """
    free = await cluster.generate(PROMPT, temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    stop = free.tokens[place]
    place = free.tokens.index(stop)
    answer = await cluster.generate(
        PROMPT, temperature=1, seed=3, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]
    )
    assert answer.tokens == free.tokens[: place + 1]
    assert answer.complete.finish_reason == FINISH.FINISH_REASON_STOP
    assert answer.complete.matched_token_id == stop


async def test_outputs_at_the_edges_of_pages(cluster):
    """Pages have 16 tokens here: TT#4392."""

    async def ask(length: int, max_tokens: int) -> list[list[int]]:
        tokens: list[list[int]] = [[], []]
        prompt = [(7 * i + length) % 500 for i in range(length)]
        more = {"temperature": 1.0, "seed": 9, "ignore_eos": True}
        async for event in cluster.stream(prompt, n=2, max_tokens=max_tokens, **more):
            tokens[event.delta.choice] += event.delta.token_ids
        return tokens

    lengths, most = (1, 15, 16, 17, 31, 32, 33), (17, 1, 2, 15, 16)
    asked = [(length, max_tokens) for length in lengths for max_tokens in most]
    told = dict(zip(asked, await asyncio.gather(*(ask(*one) for one in asked)), strict=True))
    for (length, max_tokens), choices in told.items():
        assert choices == [one[:max_tokens] for one in told[length, 17]]


async def test_whole_pages_of_a_prompt_are_cached_but_for_its_last_token(cluster):
    """A first time nothing is, at any length: vllm-project/vllm#43370, TT#4120."""
    for length in (15, 16, 17, 32, 33):
        prompt = [(11 * i + 3 * length) % 500 for i in range(length)]
        told = [await cluster.generate(prompt, max_tokens=1) for _ in range(2)]
        cached = [answer.complete.usage.cached_tokens for answer in told]
        assert cached == [0, (length - 1) // 16 * 16]


async def test_log_probabilities_of_a_prompt_stay_what_is_cached(cluster):
    """Fresh, again and behind more: vllm-project/vllm#42245, #42019.

    So are those of the first token, which the prefill worker draws: sgl-project/sglang#40298,
    NVIDIA/TensorRT-LLM#11727, vllm-project/vllm#27449.
    """

    async def ask(prompt: list[int]) -> list[float]:
        more = {"temperature": 0, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
        scores = []
        async for event in cluster.stream(prompt, prompt_logprobs=0, **more):
            delta = event.delta
            scores += [one.logprob for one in (*delta.prompt_logprobs, *delta.logprobs)]
        return scores

    prompt = [(17 * i) % 500 for i in range(40)]
    first = await ask(prompt)
    next_token = (await cluster.generate(prompt, temperature=0, max_tokens=1)).tokens
    longer = await ask([*prompt, *next_token, 7])
    for told in (await ask(prompt), longer[: len(first)]):
        assert told == pytest.approx(first, abs=1e-4)
    assert len(first) == len(prompt)


async def test_stop_string_across_tokens_is_never_shown(cluster):
    free = await cluster.generate(PROMPT, temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 4]
    answer = await cluster.generate(
        PROMPT, temperature=1, seed=3, max_tokens=40, ignore_eos=True, stop=["never", stop]
    )
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.complete.matched_stop_string == stop
    assert len(answer.tokens) < 40


async def test_min_tokens_keeps_stops_away(cluster):
    free = await cluster.generate(PROMPT, temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    answer = await cluster.generate(
        PROMPT, temperature=1, seed=3, max_tokens=20, min_tokens=8, stop_token_ids=free.tokens[:3]
    )
    assert len(answer.tokens) >= 8
    assert not set(answer.tokens[:7]) & set(free.tokens[:3])


async def test_logprobs_of_chosen_and_top(cluster):
    answer = await cluster.generate(
        PROMPT, temperature=0, max_tokens=6, logprobs=3, ignore_eos=True
    )
    assert [entry.token_id for entry in answer.logprobs] == answer.tokens
    for entry in answer.logprobs:
        assert entry.top[0].token_id == entry.token_id, "greedy takes the likeliest"
        assert len(entry.top) == 3
        assert math.isclose(entry.top[0].logprob, entry.logprob, rel_tol=1e-5)


async def test_http_gives_the_same_tokens_and_log_probabilities(cluster):
    """By OpenAI's client; a stream that it leaves gives everything back."""
    told = await cluster.generate(
        PROMPT, temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=1, ignore_eos=True
    )
    base = f"http://{cluster.router.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        [model] = [model.id async for model in client.models.list()]
        ask: Any = functools.partial(
            client.completions.create, model=model, prompt=PROMPT, temperature=0
        )
        more = {"ignore_eos": True, "return_token_ids": True}
        whole = await ask(max_tokens=12, logprobs=1, echo=True, extra_body=more)
        choice: Any = whole.choices[0]
        assert choice.model_extra["token_ids"] == told.tokens
        logprobs = choice.logprobs.token_logprobs
        assert logprobs[0] is None
        assert logprobs[len(PROMPT) :] == [entry.logprob for entry in told.logprobs]
        assert len(logprobs) == len(PROMPT) + 12
        for logprob, top in zip(logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True):
            assert logprob in top.values()
        stream = await ask(max_tokens=500, stream=True, extra_body=more)
        async for chunk in stream:
            assert chunk.choices[0].model_extra["prompt_token_ids"] == PROMPT
            break
        await stream.close()


class Answered(pydantic.BaseModel):
    """What an output is to say."""

    kind: Literal["river", "town"]
    old: bool
    sizes: Annotated[list[Literal[1, 2, 3]], pydantic.Field(max_length=3)]


async def test_structured_output_by_openais_client(cluster):
    """Streamed or not, through both workers, it is what was asked for, however it is asked."""
    base = f"http://{cluster.router.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        [model] = [model.id async for model in client.models.list()]
        ask: Any = functools.partial(
            client.chat.completions.parse, model=model, response_format=Answered, max_tokens=500
        )
        said = [{"role": "user", "content": "What is it?"}]
        for seed in range(3):
            answer = await ask(messages=said, seed=seed)
            assert answer.choices[0].finish_reason == "stop"
            assert isinstance(answer.choices[0].message.parsed, Answered)
        more = {"structured_outputs": {"choice": ["river", "town"]}}
        stream: Any = await client.completions.create(
            model=model, prompt=PROMPT, stream=True, max_tokens=30, extra_body=more
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text in {"river", "town"}
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(messages=said, response_format=_schema({"items": {"uniqueItems": True}}))
        error: Any = caught.value.body
        assert error["param"] == "response_format.json_schema.schema"
        assert "uniqueItems" in error["message"]
        assert "at /items" in error["message"]


def _schema(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def test_penalties_reach_the_decode_side(cluster):
    plain = await cluster.generate(PROMPT, temperature=0, max_tokens=30, ignore_eos=True)
    assert len(set(plain.tokens)) < 30, "the plain run repeats itself, else this shows nothing"
    penalised = await cluster.generate(
        PROMPT,
        temperature=0,
        max_tokens=30,
        ignore_eos=True,
        frequency_penalty=2,
        presence_penalty=2,
        repetition_penalty=2,
    )
    assert len(set(penalised.tokens)) > len(set(plain.tokens))


async def test_text_prompt_is_tokenized(cluster):
    text = "the quick brown fox"
    ids = (await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).input_ids
    by_text = await cluster.generate(text, temperature=0, max_tokens=8)
    by_ids = await cluster.generate(ids, temperature=0, max_tokens=8)
    assert by_text.tokens == by_ids.tokens
    back = await cluster.stub.Detokenize(inference_pb2.DetokenizeRequest(input_ids=ids))
    assert back.text == text


NAN = float("nan")


BAD_INPUT: list[tuple[str, Any, dict[str, Any]]] = [
    ("input_ids", [], {}),
    ("text", "", {}),
    ("input_ids", [VOCAB_SIZE], {}),
    ("max_tokens", PROMPT, {"max_tokens": 4090}),
    ("max_tokens", PROMPT, {"max_tokens": 1020}),
    ("max_tokens", PROMPT, {"max_tokens": 0}),
    ("input_ids", [1] * 1100, {}),
    ("temperature", PROMPT, {"temperature": NAN}),
    ("temperature", PROMPT, {"temperature": -1}),
    ("top_p", PROMPT, {"top_p": 0}),
    ("top_p", PROMPT, {"top_p": 1.5}),
    ("top_k", PROMPT, {"top_k": -2}),
    ("min_p", PROMPT, {"min_p": math.inf}),
    ("frequency_penalty", PROMPT, {"frequency_penalty": 3}),
    ("repetition_penalty", PROMPT, {"repetition_penalty": 0}),
    ("stop", PROMPT, {"stop": [""]}),
    ("min_tokens", PROMPT, {"max_tokens": 2, "min_tokens": 3}),
    ("logprobs", PROMPT, {"logprobs": 21}),
    ("logit_bias", PROMPT, {"logit_bias": {VOCAB_SIZE: 1.0}}),
]
"""The field that is wrong, the prompt, the sampling parameters."""


async def test_bad_input_names_its_field_and_takes_nothing(cluster):
    for field, prompt, sampling in BAD_INPUT:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(prompt, **sampling)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, sampling)
        assert field in caught.value.details()


async def test_live_id_with_another_body_is_refused(cluster):
    call = cluster.stream(PROMPT, request_id="mine", temperature=0, max_tokens=400, ignore_eos=True)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate([1, 2, 3], request_id="mine")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "request_id" in caught.value.details()
    call.cancel()


async def test_states_sum_to_the_pool_in_status_and_metrics(cluster):
    call = cluster.stream(PROMPT, temperature=0, max_tokens=900, ignore_eos=True)
    await call.read()
    for worker in await cluster.status():
        for pool in worker.load.pools:
            states = (
                pool.free
                + pool.held
                + pool.cached_evictable
                + pool.cached_protected
                + pool.session
                + pool.quarantined
            )
            assert states == pool.total
    for role in ("prefill", "decode"):
        assert await cluster.metric("kvrelay_pages", role=role, pool="full") == 64
    call.cancel()


async def test_status_tells_who_has_each_page(cluster):
    server = cluster.router.grpc_address
    arguments = ["status", "--pages", "--json", "--server", server]
    mine: list[dict[str, Any]] = []
    while not mine:  # on a busy machine the command may be slower than the request
        call = cluster.stream(
            PROMPT, request_id="looked-for", temperature=0, max_tokens=980, ignore_eos=True
        )
        await call.read()
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert result.exit_code == 0, result.output
        workers = {worker["worker"]: worker for worker in json.loads(result.stdout)["workers"]}
        for worker in workers.values():
            assert sum(run["num_pages"] for run in worker["owners"]) == 64
        owners = workers["decode-0"]["owners"]
        mine = [run for run in owners if run["holder"].startswith("looked-for")]
        call.cancel()
        await cluster.assert_at_baseline()  # its id is free again
    assert {run["owner"] for run in mine} == {"lease"}
    shown = await asyncio.to_thread(CliRunner().invoke, main, arguments[:2] + arguments[3:])
    assert re.search(r"^prefill-0 +full +\d+ +\d+ +index$", shown.stdout, re.MULTILINE)


async def test_workers_learn_their_speeds(cluster):
    for number in range(4):
        await cluster.generate([number, *PROMPT], temperature=0, max_tokens=8, ignore_eos=True)
    async with asyncio.timeout(SECONDS):
        while True:  # what the router knows may be older than the last answer
            workers = (await cluster.stub.GetLoads(inference_pb2.GetLoadsRequest())).workers
            decode, prefill = (worker.load.speeds for worker in workers)
            if prefill.prompts_known and decode.rows_known:
                break
            await asyncio.sleep(0.02)
    assert not prefill.rows_known
    assert not decode.prompts_known
    assert prefill.chunk_tokens == 32
    assert prefill.seconds_per_step + 32 * prefill.seconds_per_token > 0
    assert decode.seconds_per_step + decode.seconds_per_row > 0
