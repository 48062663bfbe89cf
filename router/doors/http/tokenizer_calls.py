"""The handling of /tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.router.admission.sampling_params import check_token_ids
from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS, Texts
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.chat_prompt import ChatPrompt, read_chat
from kvrelay.router.doors.http.chat_tools import read_tool_list
from kvrelay.router.doors.http.fields import Fields
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

    async def tokenize(self, body: dict[str, Any], body_bytes: int) -> Answer:
        """Return the token ids of a text or a conversation."""
        ask = read_tokenize(Fields(body), body_bytes, self._texts, self._template)
        self._check_model(ask.model)
        limits = self._fleet.limits()
        if isinstance(ask.what, ChatPrompt):
            ids = await self._texts.threads.run(ask.what.num_bytes, ask.what.input_ids, limits)
        else:
            num_bytes = len(ask.what.encode())
            ids = await self._texts.tokenize(
                "prompt", ask.what, num_bytes, add_special_tokens=ask.add_special_tokens
            )
        names = [self._texts.tokenizer.id_to_token(one) for one in ids] if ask.with_texts else None
        return {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": list(ids),
            "token_strs": names,
        }

    async def detokenize(self, body: dict[str, Any]) -> Answer:
        """Return the text of token ids."""
        model, ids, skip = read_detokenize(Fields(body))
        self._check_model(model)
        check_token_ids("tokens", ids, self._fleet.limits().vocab_size)
        if len(ids) > MAX_TEXT_TOKENS:
            raise InvalidField(
                "tokens", f"has {len(ids)} tokens; the router takes {MAX_TEXT_TOKENS}"
            )
        text = await self._texts.detokenize(list(ids), 4 * len(ids), skip_special_tokens=skip)
        return {"prompt": text}

    def info(self) -> Answer:
        """Return the facts that a client needs to make prompts itself."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": None if self._template is None else self._template.source,
            **{f"{role}_token": None for role in ("bos", "eos", "pad")},
            **self._special_tokens,
        }

    def _check_model(self, model: str) -> None:
        if model not in ("", self._config.model_name):
            raise UnknownModel(self._config.model_name, model)


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """The call in a body of /tokenize."""

    model: str
    """The model's name; empty: any."""
    what: str | ChatPrompt
    add_special_tokens: bool
    """Whether to add special tokens to a text."""
    with_texts: bool
    """Whether the answer also has the tokens' texts."""


def read_tokenize(
    fields: Fields, body_bytes: int, texts: Texts, template: ChatTemplate | None
) -> TokenizeCall:
    """Read the call in a body of /tokenize; raise `InvalidField`."""
    model, with_texts = fields.text("model") or "", fields.flag("return_token_strs")
    if fields.has("messages"):
        tools = read_tool_list(fields)
        fields.only("tool_choice", "none", "auto")
        chat = read_chat(fields, body_bytes, texts, template, tools or None)
        fields.finish()
        return TokenizeCall(model, chat, add_special_tokens=False, with_texts=with_texts)
    text, add = fields.text("prompt"), fields.optional_flag("add_special_tokens")
    fields.finish()
    if text is None:
        raise InvalidField("prompt", "the call has no text")
    return TokenizeCall(model, text, add is not False, with_texts)


def read_detokenize(fields: Fields) -> tuple[str, Sequence[int], bool]:
    """Read the model, the token ids, and whether special tokens are left out."""
    model = fields.text("model") or ""
    ids, skip = fields.token_ids("tokens"), fields.flag("skip_special_tokens")
    fields.finish()
    return model, ids, skip
