"""Reads the bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.router.errors import InvalidField
from kvrelay.router.http.chat import ChatPrompt, read_chat
from kvrelay.router.http.fields import INT32, Fields, token_ids
from kvrelay.router.http.sampling import read_sampling
from kvrelay.router.prompts import Prompt, TextPrompt, TokenPrompt
from kvrelay.router.texts import Texts
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.encoding import encode
from kvrelay.v1 import inference_pb2

MAX_PROMPTS: Final = 256
"""Of one call; each is a request of its own."""
_IGNORED: Final = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "session_id",
    "request_id",
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a call's answer is sent."""

    stream: bool
    include_usage: bool
    """A last chunk has the usage."""
    continuous_usage: bool
    """Every chunk has the usage until then."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for: so many prompts, with the same parameters."""

    message: inference_pb2.GenerateRequest
    """Without prompt and id."""
    prompts: Sequence[Prompt]
    prompt_bytes: Sequence[int]
    """Of each."""
    options: StreamOptions
    echo: bool = False

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return max(self.message.sampling_params.n, 1)


def read_completion(body: dict[str, Any], texts: Texts) -> Call:
    """The call that a body of /v1/completions is; raises `InvalidField`."""
    fields = Fields(body)
    add = fields.optional_flag("add_special_tokens")
    encoder = functools.partial(encode, texts.tokenizer, add_special_tokens=add is not False)
    prompts, sizes = _read_prompts(fields, encoder)
    params = read_sampling(fields, "max_tokens")
    best_of = fields.integer("best_of", 1, INT32)
    if best_of is not None and best_of != max(params.n, 1):
        raise fields.error("best_of", "is not served, but for the same number as n")
    echo = fields.flag("echo")
    fields.only("suffix", "")
    call = Call(_read_message(fields, params), prompts, sizes, _read_stream(fields), echo)
    _finish(fields)
    return call


def read_chat_completion(body: dict[str, Any], texts: Texts, template: ChatTemplate | None) -> Call:
    """The call that a body of /v1/chat/completions is; raises `InvalidField`."""
    fields = Fields(body)
    prompt: ChatPrompt = read_chat(fields, texts, template)
    params = read_sampling(fields, "max_completion_tokens", "max_tokens")
    fields.only("modalities", ["text"])
    fields.only("logprobs", False)
    fields.only("top_logprobs", 0)
    call = Call(_read_message(fields, params), [prompt], [prompt.num_bytes], _read_stream(fields))
    _finish(fields)
    return call


def _read_prompts(
    fields: Fields, encoder: Callable[[str, int], Sequence[int]]
) -> tuple[Sequence[Prompt], Sequence[int]]:
    """All prompts and their bytes: a text, a list of token ids, or a list of either."""
    given = fields.take("prompt")
    if given is None:
        raise InvalidField("prompt", "the request has no prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
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
    return prompts, sizes


def _read_message(
    fields: Fields, params: inference_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        sampling_params=params,
        priority=fields.integer("priority", -INT32, INT32) or 0,
        model=fields.text("model") or "",
        cache_salt=fields.text("cache_salt") or "",
    )


def _read_stream(fields: Fields) -> StreamOptions:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(stream, include_usage=False, continuous_usage=False)
    if not stream:
        raise fields.error("stream_options", "is allowed with stream alone")
    include, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.finish()
    return StreamOptions(stream, include, continuous and include)


def _finish(fields: Fields) -> None:
    """Refuses what is not served, and drops what says nothing to a server."""
    fields.ignore(*_IGNORED)
    fields.only("store", False)
    fields.only("response_format", {"type": "text"})
    fields.finish()
