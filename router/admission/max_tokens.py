"""The reading of a request's `max_tokens`, which differs from endpoint to endpoint."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from kvrelay.router.errors import ContextTooLong, InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.v1 import inference_pb2

DEFAULT_MAX_TOKENS: Final = 256
"""The `max_tokens` of a request that sets none, where neither an option nor its endpoint does."""


class OutputLimit(Enum):
    """The rule by which an endpoint reads `max_tokens`."""

    STRICT = auto()
    """A number for which there is no room is refused."""
    CUT = auto()
    """A number for which there is no room is cut to what the prompt leaves."""
    OPEN = auto()
    """The same as `CUT`, but without a number and an option the output may have all of that."""
    NOTHING = auto()
    """The output is not shown, and so needs no room: the prompt may have it all."""

    @property
    def least_output(self) -> int:
        """The fewest output tokens for which a prompt must leave room."""
        return 0 if self is OutputLimit.NOTHING else 1


def max_tokens_of(
    params: inference_pb2.SamplingParams,
    prompt_tokens: int,
    limits: RequestLimits,
    limit: OutputLimit,
    default: int | None,
    bound: int | None = None,
) -> tuple[int, bool]:
    """Return the most output tokens, and whether they are only the room that there is.

    Args:
        params: the client's sampling parameters.
        prompt_tokens: the prompt's length, which `limits` allow.
        limits: the workers' limits.
        limit: the endpoint's rule.
        default: the operator's default; None: there is none.
        bound: the model's own bound of outputs; None: there is none.

    Raises:
        InvalidField: `max_tokens` has no room, is above `bound`, or is below `min_tokens`.
    """
    room = limits.most_tokens - prompt_tokens
    fits = room if bound is None else min(room, bound)
    open_ended = False
    if limit is OutputLimit.NOTHING:
        most = 1  # workers sample one
    elif params.HasField("max_tokens"):
        if limit is OutputLimit.STRICT:
            _check_fits(params.max_tokens, prompt_tokens, limits, bound)
        most = min(params.max_tokens, fits)
    elif limit is OutputLimit.OPEN and default is None:
        most, open_ended = fits, True
    else:
        most = min(default or bound or DEFAULT_MAX_TOKENS, fits)
    if params.min_tokens > most:
        raise InvalidField(
            "min_tokens", f"must be at most max_tokens, {most}, got {params.min_tokens}"
        )
    return most, open_ended


def _check_fits(most: int, prompt_tokens: int, limits: RequestLimits, bound: int | None) -> None:
    """Raise `InvalidField` for a `max_tokens` that has no room, or is above the model's bound."""
    if most > limits.most_tokens - prompt_tokens:
        raise ContextTooLong(
            "max_tokens",
            limits.most_tokens,
            f"The prompt has {prompt_tokens} tokens, and with max_tokens {most} there are "
            f"{prompt_tokens + most}. {limits.reason}",
        )
    if bound is not None and most > bound:
        raise InvalidField(
            "max_tokens",
            f"must be at most {bound}, the max_new_tokens of the model's generation_config.json "
            f"(--generation-config), got {most}",
        )
