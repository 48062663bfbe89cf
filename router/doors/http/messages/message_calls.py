"""The handling of /v1/messages and the paths below it: chats in the words of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.max_tokens import OutputLimit
from kvrelay.router.admission.served_tokenizer import MAX_TEXT_TOKENS, Texts
from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.chat_tools import Dialect
from kvrelay.router.doors.http.completion_bodies import Call, read_chat_completion
from kvrelay.router.doors.http.completions import Completions
from kvrelay.router.doors.http.errors import MESSAGES_PATH
from kvrelay.router.doors.http.exchange import Exchange
from kvrelay.router.doors.http.json_body import read_body, refusing_depth
from kvrelay.router.doors.http.left_out import LeftOut, unknown_members
from kvrelay.router.doors.http.messages.message_bodies import CountTokensRequest, MessagesRequest
from kvrelay.router.doors.http.messages.message_chat import asked_name, chat_members
from kvrelay.router.doors.http.messages.message_reply import MessagesReply
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.router.errors import ContextTooLong, InvalidField, UnknownModel
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.limits import RequestLimits

COUNT_PATH: Final = f"{MESSAGES_PATH}/count_tokens"


class MessageCalls:
    """The handler of both paths; each call becomes that of a chat.

    Args:
        config: the router's configuration.
        fleet: the workers, which know the vocabulary.
        admission: counts calls that are refused.
        texts: the tokenizer.
        dialect: the model's conventions.
        completions: serves calls.
        left_out: counts what has no meaning here.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        admission: Admission,
        texts: Texts,
        dialect: Dialect,
        completions: Completions,
        left_out: LeftOut,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._admission = admission
        self._texts = texts
        self._dialect = dialect
        self._completions = completions
        self._left_out = left_out

    async def answer(self, exchange: Exchange, members: dict[str, Any], caller: Caller) -> None:
        """Answer a conversation."""
        with self._admission.counting("http"), refusing_depth():
            body = read_body(MessagesRequest, members)
            call = self._read(MESSAGES_PATH, body, members, exchange.body_bytes)
        if body.max_tokens == 0:  # the prompt alone is wanted, in the workers' caches
            call.message.sampling_params.max_tokens = 1
            shown = replace(call.shown, output=False)
            call = replace(call, shown=shown, output=OutputLimit.NOTHING)
        reply = MessagesReply(call, body.model or self._config.model_name)
        await exchange.unless_gone(self._completions.serve(exchange, call, reply, caller))

    async def count_tokens(
        self, exchange: Exchange, members: dict[str, Any], caller: Caller
    ) -> None:
        """Answer with the number of its tokens, even if it is too long to be served."""
        with refusing_depth():
            body = read_body(CountTokensRequest, members)
            if body.model and body.model not in self._config.model_names:
                raise UnknownModel(self._config.model_names, body.model)
            call = self._read(COUNT_PATH, body, members, exchange.body_bytes)
        [prompt], [num_bytes] = call.prompts, call.prompt_bytes
        vocabulary = self._fleet.limits().vocab_size
        limits = RequestLimits(vocabulary, *[MAX_TEXT_TOKENS] * 3)
        ids = await self._texts.threads.run(caller.turn, num_bytes, prompt.input_ids, limits)
        await exchange.answer(json.dumps({"input_tokens": len(ids)}).encode())

    def _read(
        self, path: str, body: CountTokensRequest, members: dict[str, Any], num_bytes: int
    ) -> Call:
        """Convert a body to a call; note what it has without a meaning here."""
        left_out = [f"fields.{name}" for name in unknown_members(type(body), members)]
        asked_for = chat_members(body, left_out)
        with _in_own_words():
            chat = read_body(ChatCompletionRequest, asked_for)
            call = read_chat_completion(chat, num_bytes, self._texts, self._dialect)
        self._left_out.note(path, left_out)
        asked = {field: asked_name(name) for field, name in call.asked_as.items()}
        return replace(call, asked_as={"stop": asked_name("stop"), **asked})


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Name the body's fields in errors that name those of a chat."""
    try:
        yield
    except (UnknownModel, ContextTooLong):
        raise
    except InvalidField as error:
        raise InvalidField(asked_name(error.field), error.problem) from error
