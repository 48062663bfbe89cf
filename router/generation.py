"""A request after validation: every field concrete, nothing left to default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop, each choice for itself; ranges as in inference.proto."""

    temperature: float
    top_p: float
    top_k: int
    """0: all."""
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    """Drawn if the client gave none."""
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    """None: no log-probabilities at all, not even of the chosen token."""
    logit_bias: tuple[tuple[int, float], ...]
    n: int = 1
    """Choices: independent outputs of the one prompt."""
    prompt_logprobs: int | None = None
    """None: none at all, as for `logprobs`."""
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the workers are asked to do."""

    request_id: str
    fingerprint: bytes
    """Digest of the body as the client sent it (a drawn seed is not in it):
    equal ones are the same request, tried again."""
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int

    @property
    def total_tokens(self) -> int:
        """Tokens that a decode worker must be able to hold for each choice.

        Not for all of them at once: where they do not fit together, some are
        retracted and go on later.
        """
        return len(self.input_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt at some choices of a request, as its workers are told of it.

    ::

        input_ids   prompt | emitted
                    [0, num_prompt_tokens) | what an earlier attempt said
    """

    request: GenerationRequest
    attempt: int
    choices: range
    """One alone, where something is emitted."""
    age_seconds: float
    """Since the router took the request."""
    emitted: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    """As the request's, unless they have come already."""

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Of the input ids, the prompt's."""
        return len(self.request.input_ids)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """All that is to be computed before the next token."""
        return self.request.input_ids + self.emitted
