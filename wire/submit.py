"""The messages about requests that a router sends to a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvrelay.wire.sampling_limits import LOGIT_BIAS, check_parameters
from kvrelay.wire.worker_info import WorkerAddress


class RequestKey(NamedTuple):
    """The name of one attempt at one request, on every worker that takes part in it."""

    router: str
    request_id: str
    attempt: int
    choice: int = 0
    """The index among the outputs of one submission; that of the first names them all."""

    def __str__(self) -> str:
        choice = f"/{self.choice}" if self.choice else ""
        return f"{self.request_id}#{self.attempt}{choice}"

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields of a log message about this attempt, beside its text."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    def of_choice(self, choice: int) -> RequestKey:
        """The key of the same attempt's other output."""
        return self._replace(choice=choice)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have; exactly one of the four fields is set."""

    json_schema: str | None = None
    """A JSON schema, itself in JSON, that allows the output."""
    regex: str | None = None
    """A regular expression that matches the whole output."""
    choice: tuple[str, ...] = ()
    """The texts that the output may be."""
    grammar: str | None = None
    """A grammar of the output, in Lark's form or GBNF."""

    @property
    def forms(self) -> list[str]:
        """The names of the fields that are set: exactly one, if the output is valid."""
        return [name for name in FORMS if getattr(self, name) not in (None, ())]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts around the reasoning that an output may begin with, found in its tokens' bytes."""

    begun: bool = False
    """Whether the prompt has begun it."""
    begins: tuple[str, ...] = ()
    """The texts that begin it where the prompt has not; the output begins with one."""
    ends: tuple[str, ...] = ()
    """The texts that end it."""
    ends_before: tuple[str, ...] = ()
    """The texts of single tokens that end it, too, and belong to what follows."""
    forced_end: str = ""
    """The text that is written once the budget is spent; empty: the first of `ends`."""

    @property
    def written_end(self) -> str:
        """The text that ends the reasoning when its budget is spent."""
        return self.forced_end or next(iter(self.ends), "")

    @property
    def is_whole(self) -> bool:
        """Whether it has ends that are texts, and the text that is forced has one of them."""
        return all(self.ends) and any(end in self.written_end for end in self.ends)


FORMS = ("json_schema", "regex", "choice", "grammar")
"""The fields of `StructuredOutput`."""


@dataclass(frozen=True, slots=True)
class BannedSequence:
    """Tokens that no output has one after the other; at least one."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters, with the names and meanings of vLLM and OpenAI.

    A value out of range raises `ValueError` that starts with the field's name.
    """

    temperature: float = 1.0
    """0 picks the likeliest token."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities sum to this value; in (0, 1]."""
    top_k: int = 0
    """Keep this many of the likeliest tokens (ties with the last are kept too); 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; in [0, 1]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time that the token is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if the token is in the output."""
    repetition_penalty: float = 1.0
    """The factor for tokens in prompt or output: divides positive logits, multiplies negative."""
    seed: int = 0
    """The seed of the draws; a router chooses one if the client gives none."""
    logprobs: int | None = None
    """The number of likeliest tokens to report beside the sampled one; None reports nothing."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values to add to the logits, by token id."""
    structured_output: StructuredOutput | None = None
    """The form of the output, behind its reasoning: only tokens that lead to it are sampled."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning: its end is forced then. None: as many as `max_tokens`."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are sampled; none: all are."""
    banned_sequences: tuple[BannedSequence, ...] = ()
    """Sequences of tokens that no output has; what is before it in the prompt does not count."""

    def __post_init__(self) -> None:
        check_parameters(self)
        for bias in self.logit_bias.values():
            LOGIT_BIAS.check("logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is made."""
        return self.temperature == 0

    @property
    def has_token_rules(self) -> bool:
        """Whether tokens are allowed or banned."""
        return bool(self.allowed_token_ids or self.banned_sequences)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(self.logit_bias) or self.reads_output

    @property
    def reads_output(self) -> bool:
        """Whether logits are changed by the tokens that have come before."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The conditions that end an output, apart from its client."""

    max_tokens: int
    min_tokens: int = 0
    """The fewest output tokens; before that, `max_tokens` is the only stop condition."""
    stop_token_ids: frozenset[int] = frozenset()
    """The client's stop tokens; `with_eos` adds the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings, searched for in the rendered text."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the output."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the rendered text."""
    include_stop_str_in_output: bool = False
    """The rendered text has the stop string, or the stop token's text, that ends the output."""
    reasoning: Reasoning | None = None
    """The reasoning that the output may begin with; None: none that matters."""
    stop_in_reasoning: bool = False
    """Stop strings end the output in its reasoning, too."""

    def __post_init__(self) -> None:
        check_parameters(self)

    @property
    def reasoning_without_stops(self) -> Reasoning | None:
        """The reasoning in which stop strings do not count; None: they count everywhere."""
        return self.reasoning if self.stop and not self.stop_in_reasoning else None

    def with_eos(self, eos_token_ids: Iterable[int]) -> StopConditions:
        """A copy with the model's end-of-sequence tokens, unless they are ignored."""
        eos = () if self.ignore_eos else eos_token_ids
        return dataclasses.replace(self, stop_token_ids=self.stop_token_ids.union(eos))


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """All that a client may choose for the outputs of a prompt."""

    sampling: SamplingParams
    stops: StopConditions
    n: int = 1
    """The number of choices: independent outputs of the one prompt."""
    prompt_logprobs: int | None = None
    """The number of likeliest tokens to report at each prompt token; None reports nothing."""
    speculate: bool = True
    """Drafts may be verified for the request, where the worker has a drafter."""

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True, slots=True)
class AttachHello:
    """The first command on a router's stream to a worker."""

    router: str
    incarnation: str
    """The incarnation of the worker that is meant; another one at its address refuses."""
    version: str
    """The router's version; a worker of another version refuses."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A session that the request is a turn of; its worker may keep the KV for the next turn."""

    session: str
    """The router's name for it, unique on the router."""
    most_kept_tokens: int
    """The longest history whose KV is kept."""
    owner: str = ""
    """The access token that has the session. Owners that keep most lose theirs first."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A request to start an attempt at some choices of a request."""

    key: RequestKey
    """The attempt; its router (the stream names it) and its choice are not sent."""
    input_ids: tuple[int, ...]
    """The prompt, followed by the tokens that an earlier attempt has emitted."""
    num_prompt_tokens: int
    """The number of `input_ids` that are the prompt."""
    sampling_params: GenerationParams
    first_choice: int = 0
    """The first of the `n` choices that are wanted."""
    priority: int = 0
    """The priority; requests of a lower one are scheduled earlier."""
    age_seconds: float = 0.0
    """Seconds since the router took the request."""
    prefill: WorkerAddress | None = None
    """The worker that computes the prompt; only sent to a decode worker."""
    namespace: str = ""
    """The part of the prefix index that the request uses, which is its tenant's."""
    alone: bool = False
    """The request may break the forward that it is in, so it is to have forwards of its own."""
    cached_tokens: int = 0
    """Input tokens that the router expects the worker to have; it may be wrong."""
    session: KeptSession | None = None
    """The session whose turn it is; only sent to a worker that generates."""
    traceparent: str = ""
    """The attempt's span as a W3C traceparent, if the request is traced."""
    open_ended: bool = False
    """Whether `max_tokens` is only the room that was left, as the client has set none."""
    retain_seconds: float = 0.0
    """Seconds after its end for which its cached pages are evicted after others; 0: none."""

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
    """A request to keep no KV of a session any more; an unknown session is ignored."""

    session: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A request to end all choices of an attempt."""

    key: RequestKey
    """The attempt; its router and its choice are not sent."""


@dataclass(frozen=True, slots=True)
class TellPrefixesRequest:
    """A request to tell all prefixes anew, as the router has missed an update."""


@dataclass(frozen=True, slots=True)
class WatchRequests:
    """A notice that somebody watches the requests, or that nobody does any more."""

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
