"""The rules for submissions, on the worker that takes them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.engine.scheduler.attempt_trace import AttemptTrace
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.sampling_limits import MAX_CHOICES
from kvrelay.wire.submit import SubmitRequest
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class SubmitRules:
    """The fields that a submission must have, and their bounds."""

    role: WorkerRole
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def check(self, submit: SubmitRequest) -> None:
        """Check the rules that depend on this worker, or on several fields.

        Raises:
            ValueError: a field is missing or out of range; the text begins with its name.
        """
        params = submit.sampling_params
        stops = params.stops
        self._check_ids("input_ids", submit.input_ids)
        self._check_ids("stop_token_ids", stops.stop_token_ids)
        self._check_ids("logit_bias", params.sampling.logit_bias)
        self._check_ids("allowed_token_ids", params.sampling.allowed_token_ids)
        for banned in params.sampling.banned_sequences:
            self._check_ids("banned_sequences", banned.ids)
            if not banned.ids:
                raise ValueError("banned_sequences: one is empty")
        if not submit.input_ids:
            raise ValueError("input_ids: must not be empty")
        if submit.first_choice >= MAX_CHOICES:
            raise ValueError(f"first_choice: must be below {MAX_CHOICES}")
        structured = params.sampling.structured_output
        if structured is not None and len(structured.forms) != 1:
            raise ValueError(f"structured_output: must have one form, got {structured.forms}")
        if params.sampling.thinking_token_budget is not None and stops.reasoning is None:
            raise ValueError("thinking_token_budget: needs reasoning")
        if stops.reasoning is not None and not stops.reasoning.is_whole:
            raise ValueError("reasoning: needs ends, of which forced_end has one")
        emitted = submit.num_emitted
        if not 0 <= emitted < min(stops.max_tokens, len(submit.input_ids)):
            raise ValueError(
                f"num_prompt_tokens: {submit.num_prompt_tokens} of {len(submit.input_ids)} "
                f"input_ids leave {emitted} emitted tokens of at most {stops.max_tokens}"
            )
        if emitted and params.n > 1:
            raise ValueError("n: must be 1 for a request that has emitted tokens")
        if submit.session is not None:
            self._check_session(params.n)
        if submit.prefill is not None and self.role is not WorkerRole.DECODE:
            raise ValueError("prefill: must be told to decode workers alone")

    def _check_session(self, choices: int) -> None:
        if choices > 1:
            raise ValueError("n: must be 1 for a turn of a session")
        if self.role is WorkerRole.PREFILL:
            raise ValueError("session: must not be told to prefill workers")

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        worst = max(token_ids, default=0)
        if worst >= self.vocab_size:
            raise ValueError(
                f"{field}: token id {worst} is not below the vocabulary of {self.vocab_size}"
            )


def submit_command(
    submit: SubmitRequest, link: RouterLink, rules: SubmitRules, trace: AttemptTrace | None = None
) -> Submit:
    """Make the engine's command from a router's submission.

    Raises:
        ValueError: it breaks a rule; the text begins with the field's name.
    """
    rules.check(submit)
    return Submit(
        link,
        submit.received_by(link.router, rules.eos_token_ids),
        arrived=time.monotonic() - max(submit.age_seconds, 0.0),
        trace=trace,
    )
