"""The calls in the bodies of /v1/completions, /v1/chat/completions and /v1/sessions."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvrelay.router.admission.max_tokens import OutputLimit
from kvrelay.router.admission.prompt_input import (
    Prompt,
    TextPrompt,
    TokenPrompt,
    TruncatedPrompt,
    Truncation,
)
from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS, Texts
from kvrelay.router.callers import Caller
from kvrelay.router.doors.http.answers import Shown
from kvrelay.router.doors.http.chat_parts import ToldReasoning
from kvrelay.router.doors.http.chat_prompt import read_chat
from kvrelay.router.doors.http.chat_tools import Dialect, read_tools, set_reasoning, speaker
from kvrelay.router.doors.http.logprobs_answer import TokenNames
from kvrelay.router.doors.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    SessionRequest,
    retain_seconds_of,
)
from kvrelay.router.errors import InvalidField
from kvrelay.router.requests.live_limits import FIELD
from kvrelay.text.encoding import encode
from kvrelay.text.structural_tag import StructuralTagError, structural_tag_grammar
from kvrelay.v1 import inference_pb2

_MOST_CHOICES: Final = 4096
"""The most choices of all prompts of a call."""
_ANY_OBJECT: Final = '{"type": "object"}'
_FORMS: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The forms of a structured output in the message, with the names that vLLM has for them."""
_IN_CHATS: Final = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}
"""The names in chats of the message's parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """A body's call: one or more prompts with the same parameters."""

    message: inference_pb2.GenerateRequest
    """The message, without prompt and id."""
    prompts: Sequence[Prompt]
    prompt_bytes: Sequence[int]
    """The bytes of each prompt."""
    stream: bool
    include_usage: bool
    """Whether the stream's last chunk has the usage."""
    shown: Shown
    texts: Sequence[str | None] = ()
    """The text of each prompt of a completion; None: it came as token ids."""
    asked_as: Mapping[str, str] = field(default_factory=dict)
    """The body's names of parameters that have other names in the message."""
    output: OutputLimit = OutputLimit.CUT
    """The rule for `max_tokens`."""

    @property
    def n(self) -> int:
        """The number of choices of each prompt."""
        return max(self.message.sampling_params.n, 1)


def check_fits(call: Call, caller: Caller, max_live_requests: int) -> None:
    """Refuse a call that could never be admitted whole, so that a retry would not help.

    Args:
        call: the call, whose prompts are live together.
        caller: the caller.
        max_live_requests: the most live requests that the router takes.

    Raises:
        InvalidField: it has too many prompts, or together they are too long.
    """
    num_prompts, most = len(call.prompts), max_live_requests
    if caller.max_live_requests is not None:
        most = min(most, caller.max_live_requests)
    if num_prompts > most:
        raise InvalidField(
            "prompt",
            f"has {num_prompts} prompts, and {most} requests may be live (--max-live-requests, or "
            "max_live_requests in --auth-token-file)",
        )
    if num_prompts * call.n > _MOST_CHOICES:
        raise InvalidField(
            "n", f"with {num_prompts} prompts must be at most {_MOST_CHOICES} in all"
        )
    tokens = sum([prompt.num_tokens or 1 for prompt in call.prompts])
    if caller.max_queued_prompt_tokens is not None and tokens > caller.max_queued_prompt_tokens:
        raise InvalidField(
            "prompt",
            f"has {tokens} tokens or more, and the token {caller.name} may queue "
            f"{caller.max_queued_prompt_tokens} (max_queued_prompt_tokens in --auth-token-file)",
        )


def read_completion(body: CompletionRequest, texts: Texts) -> Call:
    """Convert a body of /v1/completions to a call; raise `InvalidField`."""
    add = body.add_special_tokens is not False
    encoder = functools.partial(encode, texts.tokenizer, add_special_tokens=add)
    prompts: list[Prompt] = []
    sizes = []
    for one in body.prompt:
        if isinstance(one, str):
            prompts.append(TextPrompt("prompt", one, encoder))
            sizes.append(len(one.encode()))
        else:
            prompts.append(TokenPrompt("prompt", one))
            sizes.append(4 * len(one))
    params = body.sampling_params()
    if body.best_of is not None and body.best_of != max(params.n, 1):
        raise InvalidField("best_of", "is not served, but for the same number as n")
    prompt_alone = bool(body.echo) and body.max_tokens == 0
    if prompt_alone:
        params.max_tokens = 1  # is generated, and left out of the answer
    asked_as = _set_structure(body, params, texts)
    echo = bool(body.echo)
    call = _make_call(body, texts, params, prompts, sizes, body.logprobs, echo=echo)
    if call.message.session_id and len(prompts) > 1:
        raise InvalidField("session_id", "is not allowed with several prompts")
    shown = replace(call.shown, output=not prompt_alone)
    prompt_texts = [one if isinstance(one, str) else None for one in body.prompt]
    output = OutputLimit.NOTHING if prompt_alone else OutputLimit.CUT
    return replace(call, texts=prompt_texts, asked_as=asked_as, shown=shown, output=output)


def read_chat_completion(
    body: ChatCompletionRequest, body_bytes: int, texts: Texts, dialect: Dialect
) -> Call:
    """Convert a body of /v1/chat/completions to a call; raise `InvalidField`."""
    params = body.sampling_params()
    if body.max_completion_tokens is not None:
        params.max_tokens = body.max_completion_tokens
    if body.thinking_budget is not None and not params.HasField("thinking_token_budget"):
        params.thinking_token_budget = body.thinking_budget
    asked_as = dict(_set_structure(body, params, texts))
    tools = read_tools(body, dialect, params, texts.of_tokens)
    if tools.named or tools.required or tools.in_own_format:
        forms = (FIELD, *(f"{FIELD}.{form}" for form in _FORMS))
        asked_as = dict.fromkeys(forms, "tools")
    elif FIELD in asked_as:
        asked_as[f"{FIELD}.grammar"] = asked_as[FIELD]
    set_reasoning(params, dialect, tools)
    prompt = read_chat(body, body_bytes, texts, dialect.template, tools.shown, dialect.reasoning)
    if body.top_logprobs and not body.logprobs:
        raise InvalidField("top_logprobs", "is allowed with logprobs alone")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    call = _make_call(body, texts, params, [prompt], [prompt.num_bytes], logprobs)
    parser = speaker(
        tools,
        dialect,
        prompt,
        has_form=params.HasField(FIELD) and not tools.may_say_more,
        separates=body.separate_reasoning is not False,
    )
    shown = replace(
        call.shown,
        parser=parser,
        ends_by_calls=not tools.named,
        reasoning=_told_reasoning(body),
    )
    if dialect.tools is not None:
        shown = replace(shown, new_call_id=dialect.tools.new_id)
    renamed = {name: asked for name, asked in _IN_CHATS.items() if getattr(body, asked) is not None}
    return replace(call, asked_as={**asked_as, **renamed}, shown=shown, output=OutputLimit.OPEN)


def _told_reasoning(body: ChatCompletionRequest) -> ToldReasoning:
    """Return how the reasoning of a chat is told."""
    if body.include_reasoning is False:
        return ToldReasoning.NEVER
    if body.separate_reasoning is False:
        return ToldReasoning.AS_CONTENT
    return ToldReasoning.AT_ITS_END if body.stream_reasoning is False else ToldReasoning.AS_IT_COMES


def read_open_session(body: SessionRequest) -> inference_pb2.OpenSessionRequest:
    """Convert a body of /v1/sessions to a message."""
    return inference_pb2.OpenSessionRequest(
        session_id=body.session_id,
        idle_timeout_seconds=body.idle_timeout_seconds,
        max_kept_tokens=body.max_kept_tokens,
        history=inference_pb2.TokenIds(ids=body.history),
        history_digest=body.history_digest,
    )


def _make_call(
    body: GenerationFields,
    texts: Texts,
    params: inference_pb2.SamplingParams,
    prompts: Sequence[Prompt],
    prompt_bytes: Sequence[int],
    logprobs: int | None,
    *,
    echo: bool = False,
) -> Call:
    """Make the call of a body, by the members that both endpoints have."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise InvalidField("stream_options", "is allowed with stream alone")
    if body.prompt_logprobs is not None and stream:
        raise InvalidField("prompt_logprobs", "is not allowed with stream")
    wanted = [body.prompt_logprobs, logprobs if echo else None]
    if any(one is not None for one in wanted):
        params.prompt_logprobs = max(one for one in wanted if one is not None)
    if logprobs is not None:
        params.logprobs = logprobs
    if body.no_stop_trim is not None and not params.HasField("include_stop_str_in_output"):
        params.include_stop_str_in_output = body.no_stop_trim
    prompts = _truncated(body, params, prompts, echo=echo)
    include_usage = options is not None and bool(options.include_usage)
    shown = Shown(
        names=TokenNames(texts.of_tokens, as_ids=bool(body.return_tokens_as_token_ids)),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=echo,
        token_ids=bool(body.return_token_ids),
        skip_special_tokens=not (
            params.HasField("skip_special_tokens") and not params.skip_special_tokens
        ),
        stop_token_ids=tuple(params.stop_token_ids),
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
    )
    message = inference_pb2.GenerateRequest(
        session_id=body.session_id if isinstance(body.session_id, str) else None,
        sampling_params=params,
        priority=body.priority,
        model=body.model,
        cache_salt=body.cache_salt,
        retain_seconds=retain_seconds_of(body),
    )
    return Call(message, prompts, prompt_bytes, stream, include_usage, shown)


def _truncated(
    body: GenerationFields,
    params: inference_pb2.SamplingParams,
    prompts: Sequence[Prompt],
    *,
    echo: bool,
) -> Sequence[Prompt]:
    """Return the prompts, cut as the body asks for."""
    most = body.truncate_prompt_tokens
    if most is None:
        if body.truncation_side is not None:
            raise InvalidField("truncation_side", "is allowed with truncate_prompt_tokens alone")
        return prompts
    if not most:
        raise InvalidField("truncate_prompt_tokens", "must be at least 1, or -1 for all the room")
    if echo:
        raise InvalidField("truncate_prompt_tokens", "is not allowed with echo")
    truncation = Truncation(
        most_tokens=most if most > 0 else None,
        output_tokens=max(params.max_tokens, 1),
        keeps_end=body.truncation_side != "right",
    )
    return [TruncatedPrompt(prompt, truncation, MAX_TEXT_TOKENS) for prompt in prompts]


def _set_structure(
    body: GenerationFields, params: inference_pb2.SamplingParams, texts: Texts
) -> Mapping[str, str]:
    """Set the structured output that one of the body's members asks for.

    Returns:
        the body's names of the fields that are set in `params`.
    """
    special = texts.of_tokens.unspelled_ids
    given = [one for one in _structures(body, special) if one[2] not in (None, [])]
    if body.structured_outputs is not None and not any("structured" in one[0] for one in given):
        names = "json, regex, choice, grammar, json_object or structural_tag"
        raise InvalidField("structured_outputs", f"must have {names}")
    if not given:
        return {}
    (name, form, value), *others = given
    for other in others:
        if other[1:] != (form, value):  # clients send the same by its old and its new name
            raise InvalidField(other[0], f"is not allowed with {name}")
    params.structured_output.CopyFrom(inference_pb2.StructuredOutput(**{form: value}))
    return {FIELD: name, f"{FIELD}.{form}": name}


def _grammar_of(field: str, tag: Any, special: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag; raise `InvalidField`."""
    try:
        described = json.loads(tag) if isinstance(tag, str) else tag
        return structural_tag_grammar(described, special)
    except (StructuralTagError, ValueError, RecursionError) as error:
        raise InvalidField(field, str(error)) from error


def _structures(
    body: GenerationFields, special: Mapping[str, int]
) -> Iterator[tuple[str, str, Any]]:
    """Yield members that ask for a structure, each with its form in the message and its value."""
    response, wanted = body.response_format, body.structured_outputs
    if response is not None:
        described, kind = response.json_schema, response.type
        if kind == "json_schema":
            if described is None:
                raise InvalidField("response_format.json_schema", "is missing")
            yield "response_format.json_schema.schema", "json_schema", described.json_schema
        elif described is not None:
            raise InvalidField("response_format.json_schema", f"is not allowed with {kind}")
        elif kind == "structural_tag":
            tag = {"structures": response.structures, "triggers": response.triggers}
            tag = {"format": response.format} if response.format is not None else tag
            yield "response_format", "grammar", _grammar_of("response_format", tag, special)
        elif kind == "json_object":
            yield "response_format", "json_schema", response.json_object_schema or _ANY_OBJECT
    if wanted is not None:
        if wanted.json_object:
            yield "structured_outputs.json_object", "json_schema", _ANY_OBJECT
        if wanted.structural_tag is not None:
            name = "structured_outputs.structural_tag"
            yield name, "grammar", _grammar_of(name, wanted.structural_tag, special)
        for form, name in _FORMS.items():
            yield f"structured_outputs.{name}", form, getattr(wanted, form)
    for form, name in _FORMS.items():
        yield f"guided_{name}", form, getattr(body, f"guided_{name}")
    yield "json_schema", "json_schema", body.json_schema
    yield "regex", "regex", body.regex
    yield "ebnf", "grammar", body.ebnf
