"""The handling of /tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

from typing import Any

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

    async def tokenize(self, caller: Caller, members: dict[str, Any], body_bytes: int) -> Answer:
        """Return the token ids of a text or a conversation."""
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
        names = None
        if body.return_token_strs:
            names = [self._texts.tokenizer.id_to_token(one) for one in ids]
        return {
            "count": len(ids),
            "max_model_len": limits.most_tokens,
            "tokens": list(ids),
            "token_strs": names,
        }

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
        if model not in (None, "", self._config.model_name):
            raise UnknownModel(self._config.model_name, model)
