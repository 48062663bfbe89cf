"""Reasoning in chats: its names, its tokens, and what a request may say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from kvrelay.router.config import ReasoningFormat, RouterConfig, ToolParser
from kvrelay.v1 import worker_pb2

from ..scripted_worker import RETRACTED, ScriptedWorker, emitted_by
from .test_tools import ARGUMENTS, ASKED, EOS, HERMES, LENGTH, ask, saying, served, streamed, whole

THINKS = ">{{ enable_thinking }}{{ thinking }}{{ reasoning_effort }}{# <think> #}"
SAID = "<think>\nHm, hm.\n</think>\n\nYes, I do."


async def streamed_deltas(client: openai.AsyncOpenAI, **extra: Any) -> list[dict[str, Any]]:
    stream = await ask(client, stream=True, tools=openai.omit, extra_body=extra)
    return [one.choices[0].delta.model_dump(exclude_unset=True) async for one in stream]


async def test_reasoning_has_two_names_and_is_counted(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path, THINKS) as (cluster, client):
        cluster.workers[0].on_submit = saying(SAID, tokenizer)
        answer = await ask(client, tools=openai.omit)
        said = answer.choices[0].message.model_extra
        assert said == {"reasoning": "Hm, hm.", "reasoning_content": "Hm, hm."}
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        thought = len(tokenizer.encode("<think>\nHm, hm.").ids)
        assert abs(counted - thought) <= 2
        deltas = await streamed_deltas(client)
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == "Hm, hm."
        options = {"include_usage": True}
        stream = await ask(client, tools=openai.omit, stream=True, stream_options=options)
        usage = [chunk.usage async for chunk in stream][-1]
        assert usage.completion_tokens_details.reasoning_tokens == counted


async def test_how_reasoning_is_told(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path, THINKS) as (cluster, client):
        cluster.workers[0].on_submit = saying(SAID, tokenizer)
        for extra, reasoning, content in [
            ({"include_reasoning": False}, "", "Yes, I do."),
            ({"separate_reasoning": False}, "", SAID),
            ({"stream_reasoning": False}, "Hm, hm.", "Yes, I do."),
        ]:
            message, _ = whole(await ask(client, tools=openai.omit, extra_body=extra))
            assert (message["reasoning"], message["content"]) == (reasoning, content)
            deltas = await streamed_deltas(client, **extra)
            told = [delta["reasoning"] for delta in deltas if "reasoning" in delta]
            assert told == [reasoning] * bool(reasoning)
            assert "".join(delta.get("content") or "" for delta in deltas) == content


async def test_thinking_is_turned_off(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path, THINKS) as (cluster, client):
        cluster.workers[0].on_submit = saying("Yes.", tokenizer)
        for extra, prompt in [
            ({"reasoning_effort": "none"}, "FalseFalsenone"),
            ({"enable_thinking": False}, "FalseFalse"),
            ({"enable_thinking": True}, "TrueTrue"),
            ({"chat_template_args": {"thinking": 1}}, "1"),
            ({"enable_thinking": False, "chat_template_kwargs": {"thinking": 1}}, "False1"),
        ]:
            await ask(client, tools=openai.omit, extra_body=extra)
            sent = list(cluster.workers[0].submits[-1].input_ids)
            assert tokenizer.decode(sent) == f">{prompt}"


async def test_earlier_reasoning_has_the_templates_name(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for given in ("reasoning", "reasoning_content"):
        messages = [*ASKED, {"role": "assistant", "content": "x", given: "Hm."}, *ASKED]
        for used in ("reasoning_content", "thinking", "reasoning"):
            template = f"{{{{ messages[1].{used} }}}}"
            async with served(config, tmp_path, template) as (cluster, client):
                cluster.workers[0].on_submit = saying("Yes.", tokenizer)
                await ask(client, messages=messages, tools=openai.omit)
                assert tokenizer.decode(list(cluster.workers[0].submits[0].input_ids)) == "Hm."


async def test_the_channels_of_harmony_are_kept_apart(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{{ messages[0].content }}{# tools <|channel|> #}"
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    async with served(config, tmp_path, template) as (cluster, client):
        cluster.workers[0].on_submit = saying(text, tokenizer)
        message, reason = whole(await ask(client, tools=openai.omit))
        assert (message["reasoning"], message["content"], reason) == ("Hm.", "Yes.", "stop")
        assert not cluster.workers[0].submits[0].sampling_params.skip_special_tokens


async def test_channels_of_harmony_that_nobody_wants_told(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """They are content, without the tags."""
    template = "{{ messages[0].content }}{# tools <|channel|> #}"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "x"}'
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    given = '{"city": "x"}'
    cases: list[tuple[dict[str, Any], str, str, list[str]]] = [
        ({"tool_call_parser": ToolParser.NONE}, "Hm.", given, []),
        ({"reasoning_parser": ReasoningFormat.NONE}, "", "Hm.", [given]),
        ({"reasoning_parser": ReasoningFormat.OPENAI_GPTOSS}, "Hm.", "", [given]),
    ]
    for changes, reasoning, content, calls in cases:
        async with served(config, tmp_path, template, **changes) as (cluster, client):
            cluster.workers[0].on_submit = saying(text, tokenizer)
            message, _ = whole(await ask(client))
            assert (message["reasoning"], message["content"]) == (reasoning, content)
            assert [arguments for _, arguments in message["calls"]] == calls


FORM: Any = {"response_format": {"type": "json_object"}}
NAMED: Any = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
WRITTEN = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("end", "begun"), [("<think>\n", True), ("", False), ("<think>\n\n</think>\n\n", None)]
)
async def test_a_form_or_a_call_comes_behind_the_reasoning(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, end: str, begun: bool | None
) -> None:
    template = f"{HERMES}{{# <think> #}}{end}"
    thought = "" if begun is None else "Hm."
    before = {True: "Hm.\n</think>\n\n", False: "<think>\nHm.\n</think>\n\n", None: ""}[begun]
    calls = [["weather", ARGUMENTS]]
    async with served(config, tmp_path, template) as (cluster, client):
        worker = cluster.workers[0]
        cases: list[tuple[dict[str, Any], str, str, list[Any]]] = [
            ({**FORM, "tools": openai.omit}, '{"a": 1}', '{"a": 1}', []),
            (NAMED, WRITTEN, "", calls),
            ({"tool_choice": "required"}, WRITTEN, "", calls),
        ]
        for changes, text, content, called in cases:
            worker.on_submit = saying(before + text, tokenizer)
            for message, _ in (
                whole(await ask(client, **changes)),
                await streamed(client, **changes),
            ):
                assert message == {"content": content, "reasoning": thought, "calls": called}
            sent = worker.submits[-1].sampling_params
            assert sent.HasField("structured_output")
            assert sent.HasField("reasoning") is (begun is not None)
            if begun is not None:
                assert sent.reasoning.begun is begun
                assert (sent.reasoning.begins, sent.reasoning.ends) == (["<think>"], ["</think>"])


async def test_forms_and_calls_of_harmony_come_behind_its_analysis(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{{ messages[0].content }}{# tools <|channel|> #}"
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final, call = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.weather"
    call = f"{call} <|constrain|>json<|message|>{ARGUMENTS}"
    cases: list[tuple[dict[str, Any], str, list[Any], str]] = [
        ({**FORM, "tools": openai.omit}, f'{final}{{"a": 1}}', [], final),
        (FORM, f'{final}{{"a": 1}}', [], "<|start|>assistant"),
        ({"tool_choice": "required"}, call, [["weather", ARGUMENTS]], "<|start|>assistant"),
    ]
    async with served(config, tmp_path, template) as (cluster, client):
        worker = cluster.workers[0]
        for changes, text, calls, end in cases:
            worker.on_submit = saying(analysis + text, tokenizer)
            message, _ = whole(await ask(client, **changes))
            content = "" if calls else '{"a": 1}'
            assert message == {"content": content, "reasoning": "Hm.", "calls": calls}
            sent = worker.submits[-1].sampling_params
            assert sent.reasoning.ends[0] == end
            assert end in sent.reasoning.forced_end
            beside = f'start: "{final}" form | calls' in sent.structured_output.grammar
            assert beside is (changes is FORM)


async def test_what_depends_on_reasoning_says_where_it_ends(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cases: list[tuple[str, dict[str, Any], bool, int | None]] = [
        (THINKS, {}, False, None),
        (THINKS, {"stop": "x"}, True, None),
        (THINKS, {"thinking_token_budget": 0}, True, 0),
        (THINKS, {"thinking_budget": 7}, True, 7),
        (HERMES, {"stop": "x", "thinking_token_budget": 5}, False, None),
    ]
    for template, extra, says, budget in cases:
        async with served(config, tmp_path, template) as (cluster, client):
            cluster.workers[0].on_submit = saying("Yes.", tokenizer)
            await ask(client, tools=openai.omit, extra_body=extra)
            sent = cluster.workers[0].submits[-1].sampling_params
            assert sent.HasField("reasoning") is says
            given = sent.thinking_token_budget if sent.HasField("thinking_token_budget") else None
            assert given == budget
    async with served(config, tmp_path, THINKS) as (cluster, client):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            await client.completions.create(
                model="counter", prompt="x", extra_body={"thinking_token_budget": 5}
            )


async def test_stop_strings_let_reasoning_be_unless_asked(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A worker that has not said that it ended by one has found none."""
    async with served(config, tmp_path, THINKS) as (cluster, client):
        cluster.workers[0].on_submit = saying("<think>\nHm, hm.\n</think>\n\nYes.", tokenizer)
        asked: dict[str, Any] = {"tools": openai.omit, "stop": ["hm", "\n\n"]}
        message, reason = whole(await ask(client, **asked))
        assert (message["reasoning"], message["content"]) == ("Hm, hm.", "Yes.")
        assert reason == "stop"
        await ask(client, **asked, extra_body={"stop_in_reasoning": True})
        assert cluster.workers[0].submits[-1].sampling_params.stop_in_reasoning


@pytest.mark.parametrize("template", [THINKS, "{{ messages[0].content }}{# tools <|channel|> #}"])
async def test_an_output_that_ends_in_its_reasoning_says_so(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, template: str
) -> None:
    begin = "<think>" if template == THINKS else "<|channel|>analysis<|message|>"
    end = "</think>" if template == THINKS else "<|end|>"
    async with served(config, tmp_path, template) as (cluster, client):
        for text, unclosed in [(f"{begin}Hm", True), (f"{begin}Hm{end}", False)]:
            cluster.workers[0].on_submit = saying(text, tokenizer, LENGTH)
            answer = await ask(client, tools=openai.omit)
            [choice] = answer.choices
            assert (whole(answer)[0]["reasoning"], choice.finish_reason) == ("Hm", "length")
            assert bool((choice.model_extra or {}).get("ended_in_reasoning")) is unclosed
            stream = await ask(client, tools=openai.omit, stream=True)
            last = [chunk.choices[0] async for chunk in stream][-1]
            assert bool((last.model_extra or {}).get("ended_in_reasoning")) is unclosed


async def test_a_stream_goes_on_after_any_token(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Reasoning, content and calls are told as if one worker had said all of it."""
    text = f"<think>\nHm.\n</think>\n\nI look. {WRITTEN}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    async def say_some(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        begin = len(emitted_by(submit))
        if begin + 3 < len(ids):
            worker.say(submit, begin, tuple(ids[begin : begin + 3]), end=RETRACTED)
            return
        end = worker_pb2.RequestEnd(reason=worker_pb2.RequestEnd.REASON_STOP, matched_token_id=EOS)
        worker.say(submit, begin, (*ids[begin:], EOS), end=end)

    async with served(config, tmp_path, f"{HERMES}{{# <think> #}}") as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying(text, tokenizer)
        undisturbed = await streamed(client, stop=["Hm", "look_"])
        worker.on_submit = say_some
        assert await streamed(client, stop=["Hm", "look_"]) == undisturbed
        assert undisturbed[0]["reasoning"] == "Hm."
        assert len(worker.submits) > len(ids) // 3
        assert {one.sampling_params.reasoning.ends[0] for one in worker.submits} == {"</think>"}
