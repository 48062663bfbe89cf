"""Conversations become prompts as transformers makes them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvrelay.text.chat_template import (
    ChatTemplate,
    TemplateError,
    load_chat_template,
    special_tokens_of,
)
from tests.known import known

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = (
    "{{ bos_token }}{%- for message in messages -%}\n[{{ message.role }}] "
    "{{- message.content | trim }}{% if not loop.last %}{% continue %}{% endif %}"
    "{%- endfor -%}{% if tools %}{{ tools | tojson }}{% endif %}{{ more }}"
)
MESSAGES = [
    {"role": "user", "content": "a < b & c? "},
    {"role": "assistant", "content": " It is, "},
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
]


@pytest.mark.parametrize("source", [CHATML, STRIPPING])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_renders_as_transformers_does(source: str, options: dict[str, Any]) -> None:
    """huggingface/transformers#35433, vllm-project/vllm#9547, mistralai/mistral-common#232."""
    tools = [{"type": "function", "function": {"name": "<f>"}}]
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        MESSAGES, tools=tools, variables={"more": "yes"}, **options
    )
    [theirs], _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=source, bos_token="<s>", more="yes", **options
    )
    assert ours == theirs
    assert "a < b & c?" in ours


def test_blocks_for_training_render_their_content() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render(MESSAGES) == "a < b & c?  It is, "


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 3 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at_all }}",
    ],
)
def test_what_fails_is_said_in_a_line(source: str) -> None:
    with pytest.raises(TemplateError) as failed:
        ChatTemplate(source, {}).render(MESSAGES)
    assert len(str(failed.value).splitlines()) == 1


def test_the_last_message_must_be_shown_to_go_on() -> None:
    for source, messages in (("x", MESSAGES), (CHATML, [{"role": "user", "content": None}])):
        with pytest.raises(TemplateError):
            ChatTemplate(source, {}).render(messages, continue_final_message=True)


def test_a_broken_template_is_no_template() -> None:
    with pytest.raises(TemplateError, match="no Jinja"):
        ChatTemplate("{% for %}", {})


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": several, "eos_token": {"content": "</s>"}}))
    assert known(load_chat_template(tmp_path)).source == "D"
    assert special_tokens_of(tmp_path) == {"eos_token": "</s>"}
    config.write_text(json.dumps({"chat_template": "own"}))
    assert known(load_chat_template(tmp_path)).source == "own"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert known(load_chat_template(tmp_path)).source == "file"
    given = tmp_path / "given.jinja"
    with pytest.raises(TemplateError, match=r"given\.jinja"):
        load_chat_template(tmp_path, given)
    given.write_text("given")
    assert known(load_chat_template(tmp_path, given)).source == "given"
    config.write_text("{")
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)
