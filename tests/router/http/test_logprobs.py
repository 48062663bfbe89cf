"""OpenAI's API over HTTP: log-probabilities, echoed prompts and the names of tokens."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from kvrelay.router.doors.http.answers import (
    CompletionAnswer,
    CompletionStyle,
    HeldAnswer,
    PromptPart,
    Shown,
    Whole,
)
from kvrelay.router.doors.http.logprobs_answer import TokenNames
from kvrelay.router.requests.events import Delta
from kvrelay.text.token_texts import TokenTexts
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.output import SampledToken
from tests.known import known

from ..cluster import Cluster
from ..scripted_worker import HANDED_OVER, LENGTH, ScriptedWorker, counted
from .client import CHAT, PROMPT, events, text_of


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
    return pb.TokenLogprobs(token_id=token_id, logprob=-0.3, top=top, rank=2)


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
async def test_a_prompt_is_scored_and_nothing_else_is_answered(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    scored(cluster)
    body = {"prompt": [10, 20, 30], "max_tokens": 0, "logprobs": 1, "echo": True, "n": 2}
    answer = await http.post("/v1/completions", json={**body, "stream": stream})
    chunks = events(answer.raise_for_status().text) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        texts = [one["text"] for one in choices if one["index"] == index]
        assert "".join(texts) == text_of(tokenizer, [10, 20, 30])
        told = [
            one["logprobs"]["tokens"] for one in choices if one["index"] == index and one["text"]
        ]
        assert told == [[text_of(tokenizer, [one]) for one in (10, 20, 30)]]
    refused = await http.post("/v1/completions", json={**body, "echo": False})
    assert refused.json()["error"]["param"] == "max_tokens"


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
    assert (second["20"]["rank"], second["20"]["logprob"]) == (2, float(np.float32(-0.3)))
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

        def lengths(self, *, skip_special_tokens: bool) -> Any:
            return lambda token_id: 1

        def lengths_in(self, text: str) -> Any:
            return lambda token_id: 1

    answer, held = CompletionAnswer(CompletionStyle(), "x", "m"), HeldAnswer(1 << 20)
    shown = Shown(TokenNames(Texts(), as_ids=False), logprobs=0, echo=True)  # type: ignore[arg-type]
    whole = Whole(answer, PromptPart(0, 16, range(100)), shown, held)
    names.clear()
    whole(Delta(0, (), "", prompt_logprobs=tuple(SampledToken(n, -0.5) for n in range(1, 100))))
    assert len(names) == 2 * 99


@pytest.mark.parametrize("as_ids", [False, True])
async def test_offsets_are_places_in_the_text(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, as_ids: bool
) -> None:
    scored(cluster)
    text = "Hi 🎉 é"
    body = {"prompt": text, "echo": True, "max_tokens": 2, "logprobs": 0}
    body["return_tokens_as_token_ids"] = as_ids
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    places = choice["logprobs"]["text_offset"]
    ids = tokenizer.encode(text).ids
    assert len(places) == len(ids) + 2
    begun = [
        len(tokenizer.decode(ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}"))
        for end in range(len(ids))
    ]
    assert places[: len(ids)] == begun
    assert places[len(ids)] == len(text)
    by_ids = (await http.post("/v1/completions", json={**body, "prompt": ids})).json()
    assert by_ids["choices"][0]["logprobs"]["text_offset"] == places


def test_special_tokens_that_the_tokenizer_adds_have_no_place(tokenizer: Tokenizer) -> None:
    end = known(tokenizer.token_to_id("<|end|>"))
    texts = TokenTexts(tokenizer)
    ids = [end, *tokenizer.encode("a<|end|>b").ids, end]
    lengths = texts.lengths_in("a<|end|>b")
    assert list(map(lengths, ids)) == [0, 1, len("<|end|>"), 1, 0]
    skipping, whole = (texts.lengths(skip_special_tokens=skip) for skip in (True, False))
    assert (list(map(skipping, ids)), list(map(whole, ids))) == ([0, 1, 0, 1, 0], [7, 1, 7, 1, 7])


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
