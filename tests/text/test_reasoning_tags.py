"""Reasoning is told apart from content in each model's format, however the output is cut."""

from __future__ import annotations

import pytest

from kvrelay.router.config import ReasoningFormat
from kvrelay.text.output_parsers.formats import TOOL_FORMATS
from kvrelay.text.output_parsers.pieces import OutputParser
from kvrelay.text.output_parsers.plain import ContentParser
from kvrelay.text.output_parsers.reasoning import ReasoningParser
from kvrelay.text.output_parsers.reasoning_tags import REASONING_TAGS, reasoning_tags_of

KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)
OUTPUTS = [
    ("think", "", "<think>\nHm <b>.\n</think>\n\nYes.", "Hm <b>.", "Yes."),
    ("think", "", "Yes, <think>.", "", "Yes, <think>."),
    ("think", "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("glm45", "<|assistant|>", "<think>Hm.</think>\nYes.", "Hm.", "Yes."),
    ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", "", "Yes."),
    ("deepseek_r1", "<｜Assistant｜>", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "<｜Assistant｜>", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "<think>\n</think>", "Yes.", "", "Yes."),
    ("minimax_m2", "]~b]ai\n<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("minimax_m2", "]~b]ai\n<think>\n", "Hm, cut", "Hm, cut", ""),
    ("kimi_k2", "", f"<think>Hm. {KIMI_CALL}", "Hm.", KIMI_CALL),
    ("mistral", "[/INST]", "[THINK]Hm [x].[/THINK]Yes.", "Hm [x].", "Yes."),
    (
        "granite",
        "",
        "Here is my thought process: Hm.\n\nHere is my response: Yes.",
        "Hm.",
        "Yes.",
    ),
    ("granite", "", "Here's my thought process: Hm. Here's my response: Yes.", "Hm.", "Yes."),
    ("granite", "", "Here is my answer: Yes.", "", "Here is my answer: Yes."),
]


def said(parser: OutputParser, chunks: list[str]) -> tuple[str, str]:
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    pieces += parser.finish()
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.content for piece in pieces)


def test_all_formats_are_in_the_table() -> None:
    assert REASONING_TAGS.keys() <= {one[0] for one in OUTPUTS}
    others = {"auto", "none", "openai_gptoss"}
    assert {one.value for one in ReasoningFormat} == REASONING_TAGS.keys() | others


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), OUTPUTS)
def test_reasoning_however_it_is_cut(
    name: str, prompt: str, text: str, reasoning: str, content: str
) -> None:
    tags = REASONING_TAGS[name]

    def parser() -> OutputParser:
        return ReasoningParser(ContentParser(), begins_inside=tags.ends_in(prompt), form=tags)

    for at in range(len(text)):
        assert said(parser(), [text[:at], text[at:]]) == (reasoning, content)
    assert said(parser(), list(text)) == (reasoning, content)


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So."
    "<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes."
)


def test_the_channels_of_harmony() -> None:
    expected = ("Hm.\nSo.", "I look.\nYes.")
    for at in range(len(HARMONY)):
        parser = TOOL_FORMATS["openai"].parser({}, False)
        assert said(parser, [HARMONY[:at], HARMONY[at:]]) == expected
    assert said(TOOL_FORMATS["openai"].parser({}, False), ["No channels."]) == ("", "No channels.")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"a": "<|end|> x <|channel|> y"}', '{"a": "<|end|> x <|channel|> y"}'),
        ("<|channel|>final<|message|>`<|channel|>` or `<|end|>`.", "`<|channel|>` or `<|end|>`."),
        ("<|channel|>final<|message|>A.<|end|><|start|>assist", "A.\n<|start|>assist"),
    ],
)
def test_no_text_of_harmony_is_lost(text: str, content: str) -> None:
    for at in range(len(text)):
        parser = TOOL_FORMATS["openai"].parser({}, False)
        assert said(parser, [text[:at], text[at:]]) == ("", content)
    assert said(TOOL_FORMATS["openai"].parser({}, False), list(text)) == ("", content)


def test_the_tags_are_read_from_the_template() -> None:
    assert reasoning_tags_of("{{ x }}[THINK]") is REASONING_TAGS["mistral"]
    assert reasoning_tags_of("{{ x }}Here is my thought process:") is REASONING_TAGS["granite"]
    assert reasoning_tags_of("<|tool_calls_section_begin|></think>") is REASONING_TAGS["kimi_k2"]
    assert reasoning_tags_of("content.split('</think>')") is REASONING_TAGS["think"]
    assert reasoning_tags_of("{{ messages }}") is None
