"""Reasoning in chats: its names, its tokens, and what a request may say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from tokenizers import Tokenizer

from kvrelay.router.config import ReasoningFormat, RouterConfig, ToolParser

from .test_tools import ASKED, ask, saying, served, whole

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
