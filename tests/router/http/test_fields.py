"""Fields of vLLM, SGLang and OpenAI that clients send, through the door."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from kvrelay.v1 import worker_pb2
from tests.known import known

from ..cluster import Cluster
from ..scripted_worker import ScriptedWorker
from .client import CHAT, PROMPT, events, text_of

END = worker_pb2.RequestEnd


async def asked(cluster: Cluster, http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """What the decode worker gets of a call that is served."""
    path = "chat/completions" if "messages" in body else "completions"
    (await http.post(f"/v1/{path}", json=body, timeout=60)).raise_for_status()
    return cluster.decode.submits[-1]


async def test_what_workers_learn(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    params = (await asked(cluster, http, {**PROMPT, "allowed_token_ids": [5, 7]})).sampling_params
    assert list(params.allowed_token_ids) == [5, 7]

    submit = await asked(cluster, http, {**PROMPT, "bad_words": ["quick", " lazy dog"]})
    banned = {tuple(one.ids) for one in submit.sampling_params.banned_sequences}
    texts = {text_of(tokenizer, list(ids)) for ids in banned}
    assert texts == {"quick", " quick", "lazy dog", " lazy dog"}
    assert not submit.sampling_params.bad_words

    for field, form, value in (
        ("regex", "regex", "[ab]+"),
        ("ebnf", "grammar", 'root ::= "a"'),
        ("json_schema", "json_schema", '{"type": "null"}'),
    ):
        submit = await asked(cluster, http, {**PROMPT, field: value})
        assert getattr(submit.sampling_params.structured_output, form) == value

    wanted = {"type": "json_object", "schema": {"type": "null"}}
    submit = await asked(cluster, http, {**CHAT, "response_format": wanted})
    assert submit.sampling_params.structured_output.json_schema == '{"type": "null"}'

    submit = await asked(cluster, http, {**PROMPT, "n": 128, "max_tokens": 1})
    assert submit.sampling_params.n == 128


async def test_prompts_are_cut(cluster: Cluster, http: httpx.AsyncClient) -> None:
    long = list(range(200)) * 5
    for most, side, expected in (
        (3, None, [197, 198, 199]),
        (3, "left", [197, 198, 199]),
        (2, "right", [0, 1]),
        (-1, None, long[-(512 - 8) :]),
    ):
        body = {**PROMPT, "prompt": long, "truncate_prompt_tokens": most, "truncation_side": side}
        submit = await asked(cluster, http, body)
        assert list(submit.input_ids)[: submit.num_prompt_tokens] == expected
    chat = {**CHAT, "truncate_prompt_tokens": 4}
    submit = await asked(cluster, http, chat)
    assert submit.num_prompt_tokens == 4


async def test_content_parts_and_developers(
    shared_http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}, {"text": "d"}]},
        {"role": "tool", "content": [{"type": "text", "text": "e"}]},
    ]
    answer = await shared_http.post("/tokenize", json={"messages": messages}, timeout=60)
    text = text_of(tokenizer, answer.json()["tokens"])
    assert text == "<system>a<assistant>b<assistant>c\nd<tool>e<bot>"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2, "echo": True}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"prompt": ["x"] * 8, "n": 128, "best_of": 127}, "best_of"),
    ],
)
async def test_what_does_not_go_together(
    shared_http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await shared_http.post("/v1/completions", json={**PROMPT, **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
async def test_a_text_with_its_stop(
    cluster: Cluster, http: httpx.AsyncClient, tokenizer: Tokenizer, field: str
) -> None:
    """The worker ends the output at its third token."""
    tokens = tuple(known(tokenizer.token_to_id(letter)) for letter in "abc")
    ends: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"matched_stop_string": "c"}, {"stop": "c"}),
        ({"matched_token_id": tokens[-1]}, {"stop_token_ids": [tokens[-1]]}),
    ]
    for told, asked_for in ends:

        async def say(
            worker: ScriptedWorker, submit: worker_pb2.SubmitRequest, told: Any = told
        ) -> None:
            worker.say(submit, 0, tokens, end=END(reason=END.REASON_STOP, **told))

        cluster.prefill.on_submit, cluster.decode.on_submit = say, None
        for shows in (True, False):
            body = {**PROMPT, **asked_for, field: shows}
            answer = await http.post("/v1/completions", json=body, timeout=60)
            [choice] = answer.json()["choices"]
            assert choice["text"] == ("abc" if shows else "ab")
            streamed = await http.post("/v1/completions", json={**body, "stream": True}, timeout=60)
            parts = [one["choices"][0]["text"] for one in events(streamed.text)]
            assert "".join(parts) == choice["text"]
