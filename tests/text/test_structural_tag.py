"""Structural tags hold what follows them to a schema, and leave other text alone."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from kvrelay.text.grammar import GrammarCompiler
from kvrelay.text.structural_tag import StructuralTagError, structural_tag_grammar
from kvrelay.text.token_texts import TokenTexts
from kvrelay.wire.submit import StructuredOutput
from tests.router.toy_tokenizers import byte_level_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OLDER: Any = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<|tool|>two", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<f=", "<|tool|>"],
}
TAGS: Any = [
    {"begin": "<f=one>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
    {"begin": "<f=no>", "content": {"type": "const_string", "value": "x"}, "end": "</f>"},
]
NEWER: Any = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
ONE = '<f=one>{"a":1}</f>'
TAKEN = [
    (OLDER, f"I say <f and {ONE} and {ONE}", True),
    (OLDER, "No tag.", True),
    (OLDER, '<f=one>{"a":"x"}</f>', False),
    (OLDER, "<f=two>1", False),
    (OLDER, "<|tool|>twotrue, yes", True),
    (OLDER, "<|tool|>two3", False),
    ({"format": NEWER}, f"a <f=no>x</f>{ONE}", True),
    ({"format": NEWER}, "a <f=no>y", False),
    ({"format": {**NEWER, "at_least_one": True}}, f"a{ONE}b", True),
    ({"format": {**NEWER, "at_least_one": True}}, "a", False),
    ({"format": {**NEWER, "stop_after_first": True}}, f"a{ONE}", True),
    ({"format": {**NEWER, "stop_after_first": True}}, f"a{ONE}b", False),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[400])
    return GrammarCompiler(lambda: vocabulary)


@pytest.mark.parametrize(("described", "text", "is_taken"), TAKEN)
def test_text_with_tags(
    described: Any, text: str, is_taken: bool, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    source = structural_tag_grammar(described, TokenTexts(tokenizer).unspelled_ids)
    matcher = compiler.compile(StructuredOutput(grammar=source))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert (matcher.consume_tokens(ids) and matcher.is_accepting()) is is_taken


@pytest.mark.parametrize("described", [
    1, {}, {"structures": [], "triggers": ["a"]}, {"format": {"type": "any_text"}},
    {**OLDER, "triggers": ["x"]}, {"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]},
    {"format": {**NEWER, "tags": [{**TAGS[0], "content": {"type": "regex"}}]}},
])  # fmt: skip
def test_what_is_no_tag_is_refused(described: Any) -> None:
    with pytest.raises(StructuralTagError):
        structural_tag_grammar(described, {})
