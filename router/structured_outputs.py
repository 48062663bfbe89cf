"""Finds out whether a structured output can be had, before anything is sent to a worker."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from tokenizers import Tokenizer

from kvrelay.router.errors import InvalidField
from kvrelay.router.fleet import Fleet
from kvrelay.router.metrics import (
    GRAMMAR_HITS,
    GRAMMAR_SECONDS,
    REFUSED_GRAMMARS,
    RouterMetrics,
)
from kvrelay.text.grammar import GrammarError, Grammars, byte_vocabulary
from kvrelay.v1 import inference_pb2
from kvrelay.wire.messages import STRUCTURED_OUTPUT

FIELD: Final = "structured_output"
_FUEL: Final = 0.5
"""Of a worker's, whose vocabulary may take more: what passes here passes there."""


class StructuredOutputs:
    """Compiles grammars off the event loop, for bytes instead of the model's tokens.

    Args:
        tokenizer: has the special tokens that a grammar may name.
        fleet: the workers, which know what ends an output.
        metrics: the router's.
    """

    def __init__(self, tokenizer: Tokenizer, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._grammars = Grammars(byte_vocabulary(tokenizer), _FUEL)
        self._grammars.on_compiled = functools.partial(metrics.observe, GRAMMAR_SECONDS)
        self._grammars.on_hit = functools.partial(metrics.count, GRAMMAR_HITS)

    async def check(self, message: inference_pb2.StructuredOutput) -> None:
        """Returns if outputs can be kept to it, which has one form, within bounds.

        Raises:
            InvalidField: names the form, and the place in a schema, that cannot be enforced.
        """
        wanted = STRUCTURED_OUTPUT.from_message(message)
        [form] = wanted.forms
        try:
            if not self._fleet.known[0].eos_token_ids:
                raise GrammarError("the model has no end-of-sequence token to end an output with")
            # Shielded, since others may wait for the same.
            await asyncio.shield(asyncio.wrap_future(self._grammars.prepare(wanted)))
        except GrammarError as error:
            self._metrics.count(REFUSED_GRAMMARS, form=form)
            place = f" at {error.place}" if error.place else ""
            raise InvalidField(f"{FIELD}.{form}", f"{error}{place}") from error

    def close(self) -> None:
        """Compiles no more."""
        self._grammars.close()
