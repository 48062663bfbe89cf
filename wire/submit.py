"""What a router tells a worker of a request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvrelay.wire.worker_info import WorkerAddress

MAX_CHOICES = 16
"""Outputs of one prompt, at most."""


class RequestKey(NamedTuple):
    """Names one attempt at one request, on every worker that takes part in it."""

    router: str
    request_id: str
    attempt: int
    choice: int = 0
    """Of several outputs that one submission asks for; the first one's names them all."""

    def __str__(self) -> str:
        choice = f"/{self.choice}" if self.choice else ""
        return f"{self.request_id}#{self.attempt}{choice}"

    @property
    def fields(self) -> dict[str, str | int]:
        """What a log's message about it says beside its text."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    def of_choice(self, choice: int) -> RequestKey:
        """The same attempt's other output."""
        return self._replace(choice=choice)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an output must be, in exactly one of four forms."""

    json_schema: str | None = None
    """JSON that this schema allows; itself in JSON."""
    regex: str | None = None
    """A text that matches it as a whole."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    grammar: str | None = None
    """A text by this grammar, in Lark's form or GBNF."""

    @property
    def forms(self) -> list[str]:
        """The names of the fields that it has: one, whatever is sent."""
        return [name for name in FORMS if getattr(self, name) not in (None, ())]


FORMS = ("json_schema", "regex", "choice", "grammar")
"""The fields of `StructuredOutput`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's choice of sampling; the names and meanings of vLLM and OpenAI.

    A value out of range raises `ValueError` that starts with the field's name.
    """

    temperature: float = 1.0
    """0 picks the likeliest token."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probability reaches it; in (0, 1]."""
    top_k: int = 0
    """Keep this many of the likeliest tokens (ties with the last are kept too); 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; in [0, 1]."""
    frequency_penalty: float = 0.0
    """Taken off a logit for every time its token is in the output."""
    presence_penalty: float = 0.0
    """Taken off a logit if its token is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    seed: int = 0
    """Of the draws; a router draws it where the client gives none."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the sampled one; None reports nothing."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the logits of token ids."""
    structured_output: StructuredOutput | None = None
    """Only tokens that lead to such an output are sampled."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", "must be at least 0 and finite")
        _require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        _require(self.top_k >= 0, "top_k", "must be at least 0")
        _require(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        _require(math.isfinite(self.frequency_penalty), "frequency_penalty", "must be finite")
        _require(math.isfinite(self.presence_penalty), "presence_penalty", "must be finite")
        _require(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "must be positive and finite",
        )
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "must be at least 0")
        _require(
            all(math.isfinite(bias) for bias in self.logit_bias.values()),
            "logit_bias",
            "must be finite",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is made."""
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(self.logit_bias) or self.reads_output

    @property
    def reads_output(self) -> bool:
        """Whether they are changed by which tokens have come before."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends an output besides its client."""

    max_tokens: int
    min_tokens: int = 0
    """No stop condition but `max_tokens` counts before as many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """The client's; `with_eos` adds the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings, which are looked for in the rendered text."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the output."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the rendered text."""

    def with_eos(self, eos_token_ids: Iterable[int]) -> StopConditions:
        """The same, with the model's end-of-sequence tokens unless they are ignored."""
        eos = () if self.ignore_eos else eos_token_ids
        return dataclasses.replace(self, stop_token_ids=self.stop_token_ids.union(eos))


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """All that a client may choose for the outputs of a prompt."""

    sampling: SamplingParams
    stops: StopConditions
    n: int = 1
    """Choices: independent outputs of the one prompt."""
    prompt_logprobs: int | None = None
    """As `SamplingParams.logprobs`, for the prompt's tokens; None reports nothing."""
    speculate: bool = True
    """Drafts may be verified for it, where the worker has a drafter."""


@dataclass(frozen=True, slots=True)
class AttachHello:
    """The first command on a router's stream to a worker."""

    router: str
    incarnation: str
    """The worker that is meant; another one at its address refuses."""
    version: str
    """The router's; a worker of another version refuses."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """The request is a turn of a session, whose KV its worker may keep for the next turn."""

    session: str
    """The router's name of it, unique on the router."""
    most_kept_tokens: int
    """KV of a longer history is not kept."""
    owner: str = ""
    """The name of the token that has it: those that keep more than others lose theirs first."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """The worker is to start an attempt at some choices of a request."""

    key: RequestKey
    """Neither its router, which the stream names, nor its choice is sent."""
    input_ids: tuple[int, ...]
    """The prompt, and after it what an earlier attempt has emitted."""
    num_prompt_tokens: int
    """Of `input_ids`, the prompt."""
    sampling_params: GenerationParams
    first_choice: int = 0
    """The choices wanted are the `n` from this one on."""
    priority: int = 0
    """A lower one is scheduled earlier."""
    age_seconds: float = 0.0
    """Since the router took the request."""
    prefill: WorkerAddress | None = None
    """To a decode worker: who computes the prompt."""
    namespace: str = ""
    """The part of the prefix index that the request uses: its tenant's."""
    alone: bool = False
    """It may break the forward that it is in, so it is to have forwards of its own."""
    cached_tokens: int = 0
    """Of the input, that the router expects the worker to have; it may be wrong."""
    session: KeptSession | None = None
    """To a worker that generates: whose turn it is."""
    traceparent: str = ""
    """The attempt's span, as W3C writes it, if the request is traced."""

    @property
    def choices(self) -> tuple[int, ...]:
        """The outputs of the one prompt that are wanted; one, if any was emitted before."""
        return tuple(range(self.first_choice, self.first_choice + self.sampling_params.n))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self.input_ids[: self.num_prompt_tokens]

    @property
    def emitted_ids(self) -> tuple[int, ...]:
        """The tokens that an earlier attempt has emitted."""
        return self.input_ids[self.num_prompt_tokens :]

    @property
    def num_emitted(self) -> int:
        """How many tokens an earlier attempt has emitted."""
        return len(self.input_ids) - self.num_prompt_tokens

    def received_by(self, router: str, eos_token_ids: Iterable[int]) -> SubmitRequest:
        """Add what a worker knows: the router's name, and its model's end-of-sequence tokens.

        The key then names the first choice. Scores of a prompt come before the first token, so
        none are due once anything was emitted.
        """
        params = self.sampling_params
        return dataclasses.replace(
            self,
            key=self.key._replace(router=router, choice=self.first_choice),
            sampling_params=dataclasses.replace(
                params,
                stops=params.stops.with_eos(eos_token_ids),
                prompt_logprobs=None if self.num_emitted else params.prompt_logprobs,
            ),
        )

    def going_on(self, key: RequestKey, input_ids: tuple[int, ...]) -> SubmitRequest:
        """Make the submission of one choice that goes on after tokens that were emitted."""
        return dataclasses.replace(
            self,
            key=key,
            input_ids=input_ids,
            sampling_params=dataclasses.replace(self.sampling_params, n=1, prompt_logprobs=None),
            first_choice=key.choice,
        )


@dataclass(frozen=True, slots=True)
class ForgetSessionRequest:
    """The worker is to keep no KV of a session any more; it ignores one that it does not know."""

    session: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The worker is to end all choices of an attempt."""

    key: RequestKey
    """Neither its router nor its choice is sent."""


@dataclass(frozen=True, slots=True)
class TellPrefixesRequest:
    """The worker is to tell anew which prefixes it has: the router has missed something."""


@dataclass(frozen=True, slots=True)
class WatchRequests:
    """Somebody watches the requests, or nobody does any more."""

    on: bool


RouterCommand: TypeAlias = (
    AttachHello
    | SubmitRequest
    | CancelRequest
    | TellPrefixesRequest
    | ForgetSessionRequest
    | WatchRequests
)


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """One message of a router's stream to a worker."""

    command: RouterCommand


def _require(holds: bool, field_name: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field_name} {rule}")
