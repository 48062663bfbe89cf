"""Serves /tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

from typing import Any

from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import InvalidField, UnknownModel
from kvrelay.router.fleet import Fleet
from kvrelay.router.http.chat import read_chat
from kvrelay.router.http.fields import Fields
from kvrelay.router.http.tools import read_tool_list
from kvrelay.router.sampling_params import check_token_ids
from kvrelay.router.texts import MAX_TEXT_TOKENS, Texts
from kvrelay.text.chat_template import ChatTemplate, special_tokens_of

Answer = dict[str, Any]


class Tokenizing:
    """Answers calls; each raises `RequestError` for one that it refuses.

    Args:
        config: the router's.
        fleet: the workers, which know the vocabulary.
        texts: the tokenizer.
        template: of conversations; None: there is none.
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
        """Token ids of a text, or of a conversation; of a body of so many bytes."""
        fields = self._fields(body)
        with_texts = fields.flag("return_token_strs")
        limits = self._fleet.limits()
        if "messages" in body:
            tools = read_tool_list(fields)
            fields.only("tool_choice", "none", "auto")
            chat = read_chat(fields, body_bytes, self._texts, self._template, tools or None)
            fields.finish()
            ids = await self._texts.threads.run(chat.num_bytes, chat.input_ids, limits)
        else:
            text, add = fields.text("prompt"), fields.optional_flag("add_special_tokens")
            fields.finish()
            if text is None:
                raise InvalidField("prompt", "the call has no text")
            num_bytes = len(text.encode())
            ids = await self._texts.tokenize(
                "prompt", text, num_bytes, add_special_tokens=add is not False
            )
        names = [self._texts.tokenizer.id_to_token(one) for one in ids] if with_texts else None
        return {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": list(ids),
            "token_strs": names,
        }

    async def detokenize(self, body: dict[str, Any]) -> Answer:
        """The text of token ids."""
        fields = self._fields(body)
        ids, skip = fields.token_ids("tokens"), fields.flag("skip_special_tokens")
        fields.finish()
        check_token_ids("tokens", ids, self._fleet.limits().vocab_size)
        if len(ids) > MAX_TEXT_TOKENS:
            raise InvalidField(
                "tokens", f"has {len(ids)} tokens; the router takes {MAX_TEXT_TOKENS}"
            )
        text = await self._texts.detokenize(list(ids), 4 * len(ids), skip_special_tokens=skip)
        return {"prompt": text}

    def info(self) -> Answer:
        """What a client must know to make prompts itself."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": None if self._template is None else self._template.source,
            **{f"{role}_token": None for role in ("bos", "eos", "pad")},
            **self._special_tokens,
        }

    def _fields(self, body: dict[str, Any]) -> Fields:
        fields = Fields(body)
        model = fields.text("model") or ""
        if model not in ("", self._config.model_name):
            raise UnknownModel(self._config.model_name, model)
        return fields
