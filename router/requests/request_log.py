"""A log line for each request when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvrelay.router.errors import RequestError
from kvrelay.router.requests.live_request import LiveRequest
from kvrelay.text.encoding import decode

_log = logging.getLogger(__name__)
_MOST_TOKENS: Final = 4096
"""The number of tokens of a prompt, or of an output, that are logged: the first ones."""


class RequestLog:
    """A log with a line for each request, at level INFO; prompts and outputs are opt-in.

    Args:
        tokenizer: decodes their tokens.
        with_prompts: whether to log prompts and outputs, whatever the level of the process's log.
    """

    def __init__(self, tokenizer: Tokenizer, *, with_prompts: bool) -> None:
        self._tokenizer = tokenizer
        self._with_prompts = with_prompts
        _log.setLevel(logging.INFO if with_prompts else logging.NOTSET)

    def write(self, live: LiveRequest) -> None:
        """Write the line of a request that has its outcome."""
        if not _log.isEnabledFor(logging.INFO):
            return
        request, outputs, outcome = live.request, live.output_ids, live.outcome
        if isinstance(outcome, RequestError):
            ended = outcome.outcome
        else:
            assert outcome is not None, "it has not ended"
            ended = outcome.choices[0].finish_reason
        fields: dict[str, object] = {**live.log_fields, "outcome": str(ended)}
        message = "request %r ended: %s, %d prompt tokens, %d output tokens"
        said = [request.request_id, ended, len(request.input_ids), sum(map(len, outputs))]
        if self._with_prompts:
            fields["prompt"] = self._text(request.input_ids)
            fields["output"] = [self._text(output) for output in outputs]
            message += "; prompt %r, output %r"
            said += [fields["prompt"], fields["output"]]
        _log.info(message, *said, extra=fields)

    def _text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, list(token_ids[:_MOST_TOKENS]), skip_special_tokens=False)
