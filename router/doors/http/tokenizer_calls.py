"""The handling of /tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvrelay.router.admission.sampling_params import check_token_ids
from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS, Texts
from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.chat_prompt import read_chat
from kvrelay.router.doors.http.json_body import read_body
from kvrelay.router.doors.http.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from kvrelay.router.errors import InvalidField, UnknownModel
from kvrelay.router.placement.fleet import Fleet
from kvrelay.text.chat_template import ChatTemplate, special_tokens_of

Answer = dict[str, Any]
_SLICE: Final = 4096
"""Tokens that are written at once: to write them holds the interpreter's lock."""


class Tokenizing:
    """The handler of tokenizer calls; each raises `RequestError` for a call that it refuses.

    Args:
        config: the router's configuration.
        fleet: the workers, which know the vocabulary.
        texts: the tokenizer.
        template: the chat template; None: there is none.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, texts: Texts, template: ChatTemplate | None
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._texts = texts
        self._template = template
        self._special_tokens = special_tokens_of(config.model_path)

    async def tokenize(self, caller: Caller, members: dict[str, Any], body_bytes: int) -> bytes:
        """Return the token ids of a text or a conversation, in JSON."""
        body: TokenizeChatRequest | TokenizeCompletionRequest
        if members.get("messages") is not None:
            body = read_body(TokenizeChatRequest, members)
            self._check_model(body.model)
            chat = read_chat(body, body_bytes, self._texts, self._template, body.tools)
            limits = self._fleet.limits()
            ids = await self._texts.threads.run(caller.turn, chat.num_bytes, chat.input_ids, limits)
        else:
            body = read_body(TokenizeCompletionRequest, members)
            self._check_model(body.model)
            limits = self._fleet.limits()
            num_bytes, add = len(body.prompt.encode()), body.add_special_tokens is not False
            ids = await self._texts.tokenize(
                caller.turn, "prompt", body.prompt, num_bytes, add_special_tokens=add
            )
        name_of = self._texts.tokenizer.id_to_token if body.return_token_strs else None
        return await self._texts.threads.run(
            caller.turn, 4 * len(ids), _tokens_answer, ids, limits.most_tokens, name_of
        )

    async def detokenize(self, caller: Caller, members: dict[str, Any]) -> Answer:
        """Return the text of token ids."""
        body = read_body(DetokenizeRequest, members)
        self._check_model(body.model)
        ids = body.tokens
        check_token_ids("tokens", ids, self._fleet.limits().vocab_size)
        if len(ids) > MAX_TEXT_TOKENS:
            raise InvalidField(
                "tokens", f"has {len(ids)} tokens; the router takes {MAX_TEXT_TOKENS}"
            )
        skip = bool(body.skip_special_tokens)
        text = await self._texts.detokenize(
            caller.turn, list(ids), 4 * len(ids), skip_special_tokens=skip
        )
        return {"prompt": text}

    def info(self) -> Answer:
        """Return the facts that a client needs to make prompts itself."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": None if self._template is None else self._template.source,
            **{f"{role}_token": None for role in ("bos", "eos", "pad")},
            **self._special_tokens,
        }

    def _check_model(self, model: str | None) -> None:
        if model and model not in self._config.model_names:
            raise UnknownModel(self._config.model_names, model)


def _tokens_answer(
    ids: Sequence[int], most_tokens: int, name_of: Callable[[int], str | None] | None
) -> bytes:
    """Return the answer with these tokens; call it in a thread."""
    names = "null" if name_of is None else _list(ids, name_of)
    return (
        f'{{"count": {len(ids)}, "max_model_len": {most_tokens}, '
        f'"tokens": {_list(ids)}, "token_strs": {names}}}'
    ).encode()


def _list(ids: Sequence[int], told: Callable[[int], int | str | None] = int) -> str:
    """Return what is told of each token, in JSON."""
    slices = (ids[begin : begin + _SLICE] for begin in range(0, len(ids), _SLICE))
    return f"[{', '.join(json.dumps([told(one) for one in part])[1:-1] for part in slices)}]"
