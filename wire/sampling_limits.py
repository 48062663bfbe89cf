"""The legal values of what a client may choose for an output: one table for doors and workers.

A door refuses a request with another value and names the field. A worker checks numbers and flags
again; how many strings and rules there may be is the door's affair.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_CHOICES: Final = 128
"""The most outputs of one prompt."""
MAX_STOP_STRINGS: Final = 16
"""The most stop strings of a request."""
MAX_STOP_LENGTH: Final = 1024
"""The most characters of one stop string."""
MAX_TOKEN_RULES: Final = 1024
"""The most entries of `stop_token_ids`, `logit_bias`, `banned_sequences` and `bad_words`."""
MAX_ALLOWED_TOKENS: Final = 1 << 14
"""The most entries of `allowed_token_ids`."""
MAX_BANNED_TOKENS: Final = 1 << 14
"""The most tokens of all entries of `banned_sequences` together."""
MAX_ALTERNATIVES: Final = 1024
"""The most texts of a structured output's `choice`."""
MAX_REASONING_TEXTS: Final = 16
"""The most texts of each kind that `reasoning` may have, of `MAX_STOP_LENGTH` each."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The legal values of one parameter, which are finite."""

    kind: type[float] | type[int] | type[bool]
    least: float = 0
    most: float = math.inf
    above_least: bool = False
    """Whether `least` itself is illegal."""

    def __contains__(self, value: float) -> bool:
        above = value > self.least if self.above_least else value >= self.least
        return above and value <= self.most and math.isfinite(value)

    @property
    def rule(self) -> str:
        """The end of the sentence that begins with the parameter's name."""
        if self.kind is int and math.isinf(self.most):
            return f"must be at least {self.least:g}"
        if self.kind is int and not self.least:
            return f"must be at most {self.most:g}"
        left, right = "(" if self.above_least else "[", ")" if math.isinf(self.most) else "]"
        return f"must be in {left}{self.least:g}, {self.most:g}{right}"

    @property
    def form(self) -> str:
        """The format in which a message shows a value."""
        return "d" if self.kind is int else "g"

    def check(self, field: str, value: float) -> None:
        """Raise ValueError, with the field's name first, unless a value is legal."""
        if value not in self:
            raise ValueError(f"{field}: {self.rule}, got {value:{self.form}}")


def _as_sent(number: float) -> float:
    """Round a number as a message's field of 32 bits does."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


LIMITS: Final[Mapping[str, Limits]] = {
    "temperature": Limits(float),
    "top_p": Limits(float, 0, 1, above_least=True),
    "min_p": Limits(float, 0, 1),
    "frequency_penalty": Limits(float, -2, 2),
    "presence_penalty": Limits(float, -2, 2),
    # Divided by a smaller number, a logit soon becomes infinite.
    "repetition_penalty": Limits(float, _as_sent(0.01), 2),
    "top_k": Limits(int),
    "logprobs": Limits(int, most=20),
    "prompt_logprobs": Limits(int, most=20),
    # There is no bound on n times max_tokens: each choice must fit alone, and where
    # they do not fit together the workers retract some for a while.
    "n": Limits(int, 1, MAX_CHOICES),
    "max_tokens": Limits(int, 1),
    "min_tokens": Limits(int),
    "ignore_eos": Limits(bool),
    "skip_special_tokens": Limits(bool),
    "speculate": Limits(bool),
    "include_stop_str_in_output": Limits(bool),
    "thinking_token_budget": Limits(int),
    "stop_in_reasoning": Limits(bool),
}
"""The parameters that are one number or one flag, in the order in which they are checked."""
LOGIT_BIAS: Final = Limits(float, -100, 100)
"""The legal values of each entry of `logit_bias`."""


def check_parameters(params: Any) -> None:
    """Check those fields of a dataclass that the table has; None stands for nothing.

    Raises:
        ValueError: a value is illegal; the text begins with the field's name.
    """
    for field in dataclasses.fields(params):
        limits, value = LIMITS.get(field.name), getattr(params, field.name)
        if limits is not None and value is not None:
            limits.check(field.name, value)
