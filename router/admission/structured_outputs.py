"""A check of structured outputs before anything is sent to a worker."""

from __future__ import annotations

import functools
import hashlib

from tokenizers import Tokenizer

from kvrelay.router.admission.grammar_checks import GrammarChecks
from kvrelay.router.callers import Caller
from kvrelay.router.errors import InvalidField
from kvrelay.router.generation import Grammar
from kvrelay.router.metrics import (
    GRAMMAR_HITS,
    GRAMMAR_SECONDS,
    REFUSED_GRAMMARS,
    RouterMetrics,
)
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.requests.live_limits import FIELD
from kvrelay.text.grammar import GrammarError
from kvrelay.text.grammar_checker import GrammarChecker
from kvrelay.text.output_parsers.formats import form_beside_calls
from kvrelay.v1 import inference_pb2
from kvrelay.wire.messages import STRUCTURED_OUTPUT


class StructuredOutputs:
    """A check of grammars in a process of their own.

    Args:
        tokenizer: the vocabulary that workers compute masks for.
        fleet: the workers, which know what ends an output.
        metrics: the router's.
        retry_after_ms: the time after which a client that was refused for a full queue should try
            again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fleet: Fleet,
        metrics: RouterMetrics,
        retry_after_ms: int = 1000,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._checks = GrammarChecks(
            GrammarChecker(tokenizer.to_str()),
            retry_after_ms,
            functools.partial(metrics.observe, GRAMMAR_SECONDS),
            functools.partial(metrics.count, GRAMMAR_HITS),
        )

    async def check(self, message: inference_pb2.StructuredOutput, caller: Caller) -> Grammar:
        """Check a structured output of one form, within bounds; return its grammar.

        An error of a form that calls may take the place of is told as if it stood alone.

        Raises:
            InvalidField: the grammar cannot be enforced; the error names the form, and the place in
                a schema.
            GrammarQueueFull: too many grammars wait to be checked.
            Unavailable: they cannot be checked now.
        """
        wanted = STRUCTURED_OUTPUT.from_message(message)
        [form] = wanted.forms
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        try:
            if not self._fleet.known[0].eos_token_ids:
                raise GrammarError("the model has no end-of-sequence token to end an output with")
            return Grammar(key, await self._checks.check(wanted, key, caller.turn))
        except GrammarError as error:
            alone = form_beside_calls(wanted.grammar or "")
            if alone is not None:
                await self.check(inference_pb2.StructuredOutput(json_schema=alone), caller)
            self._metrics.count(REFUSED_GRAMMARS, form=form)
            place = f" at {error.place}" if error.place else ""
            raise InvalidField(f"{FIELD}.{form}", f"{error}{place}") from error

    def close(self) -> None:
        """Stop all checks."""
        self._checks.close()
