"""The reading of the bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvrelay.router.admission.prompt_input import Prompt, TextPrompt, TokenPrompt
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.structured_outputs import FIELD
from kvrelay.router.callers import Caller
from kvrelay.router.doors.http.answers import Shown
from kvrelay.router.doors.http.chat_prompt import ChatPrompt, read_chat
from kvrelay.router.doors.http.chat_tools import Dialect, read_tools, speaker
from kvrelay.router.doors.http.fields import INT32, TOKEN_IDS, UINT32, Fields, Schema, token_ids
from kvrelay.router.doors.http.logprobs_answer import TokenNames
from kvrelay.router.doors.http.output_constraints import read_structured
from kvrelay.router.doors.http.sampling_fields import read_sampling
from kvrelay.router.errors import InvalidField
from kvrelay.text.encoding import encode
from kvrelay.v1 import inference_pb2
from kvrelay.wire.history_digest import FORM, digest_tokens

MAX_PROMPTS: Final = 256
"""The most prompts of one call; each is a request of its own."""
_IGNORED: Final = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "request_id",
)
_ONLY_DEFAULTS: Final = {
    "use_beam_search": False,
    "length_penalty": 1,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "allowed_token_ids": [],
    "bad_words": [],
}
"""The parameters of vLLM that are not served, with the values at which they have no effect."""
_IN_CHATS: Final = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}
"""The names in chats of the message's parameters."""
_PROMPT: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        {**TOKEN_IDS, "minItems": 1},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {**TOKEN_IDS, "minItems": 1}]},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The way in which a call's answer is sent."""

    stream: bool
    include_usage: bool
    """Whether the stream's last chunk has the usage."""


@dataclass(frozen=True, slots=True)
class Call:
    """A body's call: one or more prompts with the same parameters."""

    message: inference_pb2.GenerateRequest
    """The message, without prompt and id."""
    prompts: Sequence[Prompt]
    prompt_bytes: Sequence[int]
    """The bytes of each prompt."""
    options: StreamOptions
    shown: Shown
    texts: Sequence[str | None] = ()
    """The text of each prompt of a completion; None: it came as token ids."""
    asked_as: Mapping[str, str] = field(default_factory=dict)
    """The body's names of parameters that have other names in the message."""

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
    tokens = sum([prompt.num_tokens or 1 for prompt in call.prompts])
    if caller.max_queued_prompt_tokens is not None and tokens > caller.max_queued_prompt_tokens:
        raise InvalidField(
            "prompt",
            f"has {tokens} tokens or more, and the token {caller.name} may queue "
            f"{caller.max_queued_prompt_tokens} (max_queued_prompt_tokens in --auth-token-file)",
        )


def read_completion(fields: Fields, texts: Texts) -> Call:
    """Read the call in a body of /v1/completions; raise `InvalidField`."""
    add = fields.optional_flag("add_special_tokens")
    encoder = functools.partial(encode, texts.tokenizer, add_special_tokens=add is not False)
    prompts, sizes, prompt_texts = _read_prompts(fields, encoder)
    params = read_sampling(fields, "max_tokens")
    logprobs = fields.integer("logprobs", 0, UINT32)
    best_of = fields.integer("best_of", 1, INT32)
    if best_of is not None and best_of != max(params.n, 1):
        raise fields.error("best_of", "is not served, but for the same number as n")
    echo = fields.flag("echo")
    prompt_alone = echo and params.HasField("max_tokens") and params.max_tokens == 0
    if prompt_alone:
        params.max_tokens = 1  # is generated, and left out of the answer
    fields.only("suffix", "")
    asked_as = read_structured(fields, params)
    call = _read_rest(fields, texts, params, prompts, sizes, logprobs, echo=echo)
    if call.message.session_id and len(prompts) > 1:
        raise InvalidField("session_id", "is not allowed with several prompts")
    shown = replace(call.shown, output=not prompt_alone)
    return replace(call, texts=prompt_texts, asked_as=asked_as, shown=shown)


def read_chat_completion(fields: Fields, body_bytes: int, texts: Texts, dialect: Dialect) -> Call:
    """Read the call in a body of /v1/chat/completions; raise `InvalidField`."""
    renamed = {name: asked for name, asked in _IN_CHATS.items() if fields.has(asked)}
    params = read_sampling(fields, "max_completion_tokens", "max_tokens")
    asked_as = dict(read_structured(fields, params))
    tools = read_tools(fields, dialect, params)
    if tools.named or tools.required:
        asked_as = {f"{FIELD}.json_schema": "tools", FIELD: "tools"}
    prompt: ChatPrompt = read_chat(fields, body_bytes, texts, dialect.template, tools.shown)
    fields.only("modalities", ["text"])
    fields.only("echo", False)
    alternatives = fields.integer("top_logprobs", 0, UINT32)
    logprobs = (alternatives or 0) if fields.flag("logprobs") else None
    if alternatives and logprobs is None:
        raise fields.error("top_logprobs", "is allowed with logprobs alone")
    call = _read_rest(fields, texts, params, [prompt], [prompt.num_bytes], logprobs)
    parser = speaker(
        tools, dialect, lambda: prompt.ends_in_reasoning, has_form=params.HasField(FIELD)
    )
    shown = replace(call.shown, parser=parser, ends_by_calls=not tools.named)
    return replace(call, asked_as={**asked_as, **renamed}, shown=shown)


def read_open_session(fields: Fields) -> inference_pb2.OpenSessionRequest:
    """Read the message in a body of /v1/sessions; raise `InvalidField`."""
    message = inference_pb2.OpenSessionRequest(session_id=fields.text("session_id") or "")
    timeout = fields.number("idle_timeout_seconds")
    kept = fields.integer("max_kept_tokens", 0, UINT32)
    message.history.ids.extend(fields.token_ids("history"))
    message.history_digest = _read_digest(fields)
    fields.finish()
    if timeout is not None:
        message.idle_timeout_seconds = timeout
    if kept is not None:
        message.max_kept_tokens = kept
    return message


def _read_digest(fields: Fields) -> str:
    """Read the digest of a history; empty if there is none."""
    digest = fields.take("history_digest", {"type": "string", "pattern": f"^{FORM}$"})
    if digest is None:
        return ""
    try:
        digest_tokens(str(digest))
    except ValueError as error:
        raise fields.error("history_digest", str(error)) from None
    return str(digest)


def _read_rest(
    fields: Fields,
    texts: Texts,
    params: inference_pb2.SamplingParams,
    prompts: Sequence[Prompt],
    prompt_bytes: Sequence[int],
    logprobs: int | None,
    *,
    echo: bool = False,
) -> Call:
    """Read the fields that both endpoints have, and refuse the rest."""
    options, continuous = _read_stream(fields)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, UINT32)
    if prompt_logprobs is not None and options.stream:
        raise fields.error("prompt_logprobs", "is not allowed with stream")
    wanted = [prompt_logprobs, logprobs if echo else None]
    if any(one is not None for one in wanted):
        params.prompt_logprobs = max(one for one in wanted if one is not None)
    if logprobs is not None:
        params.logprobs = logprobs
    names = TokenNames(texts.of_tokens, as_ids=fields.flag("return_tokens_as_token_ids"))
    shown = Shown(
        names=names,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        token_ids=fields.flag("return_token_ids"),
        continuous_usage=continuous,
    )
    call = Call(_read_message(fields, params), prompts, prompt_bytes, options, shown)
    _finish(fields)
    return call


def _read_prompts(
    fields: Fields, encoder: Callable[[str, int], Sequence[int]]
) -> tuple[Sequence[Prompt], Sequence[int], Sequence[str | None]]:
    """Read all prompts, their bytes and texts: a text, a list of token ids, or a list of either."""
    given = fields.take("prompt", _PROMPT)
    if given is None:
        raise InvalidField("prompt", "the request has no prompt")
    is_number = isinstance(given, list) and given and type(given[0]) in (int, float)
    if isinstance(given, str) or is_number:
        given = [given]
    if not isinstance(given, list) or not given:
        raise InvalidField("prompt", "must be a text, token ids, or a list of either")
    if len(given) > MAX_PROMPTS:
        raise InvalidField("prompt", f"has {len(given)} prompts; the router takes {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    sizes = []
    for one in given:
        if isinstance(one, str):
            prompts.append(TextPrompt("prompt", one, encoder))
            sizes.append(len(one.encode()))
        else:
            ids = token_ids("prompt", one)
            prompts.append(TokenPrompt("prompt", ids))
            sizes.append(4 * len(ids))
    return prompts, sizes, [one if isinstance(one, str) else None for one in given]


def _read_message(
    fields: Fields, params: inference_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    session_id = fields.take("session_id")  # other servers' clients send what they like
    return inference_pb2.GenerateRequest(
        session_id=session_id if isinstance(session_id, str) else "",
        sampling_params=params,
        priority=fields.integer("priority", -INT32, INT32) or 0,
        model=fields.text("model") or "",
        cache_salt=fields.text("cache_salt") or "",
    )


def _read_stream(fields: Fields) -> tuple[StreamOptions, bool]:
    """Read the options, and whether every chunk has the usage so far."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(stream, include_usage=False), False
    if not stream:
        raise fields.error("stream_options", "is allowed with stream alone")
    include, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.finish()
    return StreamOptions(stream, include), continuous and include


def _finish(fields: Fields) -> None:
    """Refuse parameters that are not served, and drop those without meaning for a server."""
    for name, default in _ONLY_DEFAULTS.items():
        fields.only(name, default)
    fields.ignore(*_IGNORED)
    fields.only("store", False)
    fields.finish()
