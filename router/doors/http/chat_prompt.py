"""The conversation in a body of /v1/chat/completions, as a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvrelay.router.admission.prompt_input import BegunReasoning, encoded
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.doors.http.protocol import ChatFields
from kvrelay.router.errors import InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.text.chat_template import ChatTemplate, TemplateError
from kvrelay.text.control_tokens import PartedConversation
from kvrelay.text.encoding import encode
from kvrelay.text.output_parsers.reasoning_tags import THINK, ReasoningTags

_REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")
"""The names of a message's reasoning, in bodies and in templates."""
_THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""The variables by which templates turn reasoning off."""


class ChatPrompt:
    """A conversation that a chat template turns into text.

    Args:
        texts: tokenizes the text.
        template: renders it.
        messages: the messages, whose contents are strings.
        options: the arguments of `ChatTemplate.render`.
        num_bytes: the approximate bytes of the text.
        add_special_tokens: whether to add special tokens beside those that the template writes.
        tags: the tags of reasoning.
    """

    field = "messages"
    num_tokens: int | None = None

    def __init__(
        self,
        texts: Texts,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        num_bytes: int,
        *,
        add_special_tokens: bool,
        tags: ReasoningTags,
    ) -> None:
        self._texts = texts
        self._template = template
        self._messages = messages
        self._options = options
        self.num_bytes = num_bytes
        self._add_special_tokens = add_special_tokens
        self._tags = tags
        self._hidden: PartedConversation | None = None
        """The conversation with its control tokens parted; None: it spells none."""
        self.reasoning = BegunReasoning.AS_ASKED
        """The state of the answer's reasoning behind the text, known after the rendering."""
        self.ends_in_words = False
        """Whether the text has words of the answer; known after the rendering."""

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """Return the conversation's tokens; raise `InvalidField` if no room for output is left."""
        self._hide_control_tokens()
        text = self._render()
        end = text.rstrip()
        if self._options["continue_final_message"]:
            said = self._messages[-1]["content"]
            begun = max(map(said.rfind, self._tags.opens))
            self.ends_in_words = not end.endswith(self._tags.opens)
            if begun > max(map(said.rfind, self._tags.closes)):
                self.reasoning = BegunReasoning.BEGUN
            elif said.strip():
                self.reasoning = BegunReasoning.OVER
        elif self._tags.ends_in(end):
            self.reasoning = BegunReasoning.BEGUN
        elif end.endswith(self._tags.closes):
            self.reasoning = BegunReasoning.OVER
        return encoded(self.field, text, self._encode, limits)

    def _render(self) -> str:
        """Return the conversation's text; raise `InvalidField` if the template refuses it.

        A template that needs a call's arguments as an object gets broken ones within an object.
        """
        try:
            return self._template.render(self._messages, **self._options)
        except TemplateError as error:
            mended = [_with_objects(message) for message in self._messages]
            if mended == self._messages:
                raise self._refusal(error) from error
        try:
            return self._template.render(mended, **self._options)
        except TemplateError as error:
            raise self._refusal(error) from error

    def _hide_control_tokens(self) -> None:
        """Part control tokens that the client has spelled, so that none is the template's."""
        control = self._texts.control_tokens
        if control is None:
            return
        given = {"messages": self._messages, **self._options}
        try:
            self._hidden = control.hide(given, [*self._tags.opens, *self._tags.closes])
        except RecursionError:
            raise InvalidField(self.field, "is nested too deeply") from None
        if self._hidden is not None:
            options = self._hidden.conversation
            self._messages, self._options = options.pop("messages"), options

    def _refusal(self, error: TemplateError) -> InvalidField:
        told = str(error) if self._hidden is None else self._hidden.shown(str(error))
        return InvalidField(self.field, told)

    def _encode(self, text: str, most_tokens: int) -> Sequence[int]:
        add = self._add_special_tokens
        if self._hidden is not None:
            return self._hidden.encode(text, most_tokens, add_special_tokens=add)
        return encode(self._texts.tokenizer, text, most_tokens, add_special_tokens=add)


def read_chat(
    body: ChatFields,
    body_bytes: int,
    texts: Texts,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tags: ReasoningTags | None = None,
) -> ChatPrompt:
    """Convert a body's conversation and rendering options to a prompt; raise `InvalidField`.

    Args:
        body: the body.
        body_bytes: the bytes of the whole body, since a template may write any part of it.
        texts: tokenizes the conversation.
        template: renders it; None: there is none.
        tools: the tools that the model is told of; a template is given none for an empty list.
        tags: the tags of reasoning; None: the model's are unknown.
    """
    variables = {**(body.chat_template_args or {}), **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    thinks = False if body.reasoning_effort == "none" else body.enable_thinking
    if thinks is not None:
        for name in _THINKING_SWITCHES:
            variables.setdefault(name, thinks)
    goes_on, begins = bool(body.continue_final_message), body.add_generation_prompt
    if goes_on and begins:
        raise InvalidField("continue_final_message", "is not allowed with add_generation_prompt")
    options = {
        "add_generation_prompt": not goes_on and begins is not False,
        "continue_final_message": goes_on,
        "tools": tools or None,
        "variables": variables,
    }
    if template is None:
        raise InvalidField(
            "messages",
            "the model has no chat template: use /v1/completions, or serve it with --chat-template",
        )
    add = bool(body.add_special_tokens)
    messages = [_as_read(one, template.source) for one in body.messages]
    return ChatPrompt(
        texts,
        template,
        messages,
        options,
        body_bytes,
        add_special_tokens=add,
        tags=tags or THINK,
    )


def _as_read(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """Return a message with its reasoning under each name that the template uses.

    A developer is the system to templates that know none. An empty list of calls is left out:
    templates take the member for a call. So is `thinking` beside calls and content, for which
    gpt-oss's template has one place.
    """
    said = next((message[name] for name in _REASONING_NAMES if message.get(name)), None)
    used = {name: said for name in _REASONING_NAMES if re.search(rf"\b{name}\b", template)}
    read = {**message, **used} if isinstance(said, str) else {**message}
    if read["role"] == "developer" and "developer" not in template:
        read["role"] = "system"
    if not read.get("tool_calls"):
        read.pop("tool_calls", None)
    elif read.get("content"):
        read.pop("thinking", None)
    return read


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have objects for arguments: broken ones are a member."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    mended = []
    for call in calls:
        given = call["function"].get("arguments")
        read = given if isinstance(given, dict) else {"arguments": given}
        mended.append({**call, "function": {**call["function"], "arguments": read}})
    return {**message, "tool_calls": mended}
