"""The cost of a worker's steps, learned from steps that have ended."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvrelay.engine.executor.borrowed_threads import NO_PART, Part, worthy_parts
from kvrelay.wire.speeds import StepSpeeds, StepWork

_Array: TypeAlias = npt.NDArray[np.float64]

_KEPT_SAMPLES = 5
_FEWEST_SAMPLES = 3
"""The times that a kind of step must be seen before it counts: first forwards compile and warm
up."""
_MOST_KINDS = 64
_FIT_EVERY = 16
"""Steps between two fits."""
_HALF_LIFE_STEPS = 128
"""The number of steps without one of its kind in which a kind's weight halves."""
_LEAST_WEIGHT = 1e-3
"""The least weight, so that old samples still count where there are no newer ones."""
_MOST_WRONG = 8
"""The largest factor between the measured and the expected time of a step when its error is
weighed."""
_PENALTIES = np.array([1e-6, 1e-8, 1e-4, 1e-5, 1e-4])
"""Penalties on the costs of a step, a token, a pair, a row and a row's pair. If steps do not tell
these apart, chunks cost by the token, and steps of rows cost all the same."""


class SpeedLearner:
    """A fit of `StepSpeeds` to a worker's steps. Takes microseconds a step; on one thread.

    Steps of about the same work are of one kind. The median of its last steps stands for each kind,
    so that a single delayed step changes nothing. Over the kinds goes a least-squares fit of
    relative errors with costs that are not negative. A kind's weight fades while it is not seen.

    Args:
        chunk_tokens: the most prompt tokens of a step.
    """

    def __init__(self, chunk_tokens: int = 0) -> None:
        self.speeds = StepSpeeds(chunk_tokens=chunk_tokens)
        """The speeds, as far as they are known."""
        self.last_seconds = 0.0
        """The duration of the latest step."""
        self._kinds: dict[_Key, _Kind] = {}  # the latest seen is the last
        self._known_alone = NO_PART
        """Parts that are large enough to borrow cores for, but were measured without them."""
        self._costs = np.zeros(5)
        self._steps = 0
        self._unfitted_steps = 0

    def observe(self, work: StepWork, seconds: float, widening: float = 1.0) -> None:
        """Learn from a step that has ended well.

        Args:
            work: the work that it has computed.
            seconds: the time that it took.
            widening: the threads it had, as a multiple of the worker's own. If more than 1, the
                step says nothing of the worker's own speed. It is ignored once such steps were
                measured without others' cores. Until then its time counts multiplied by `widening`,
                which is an upper bound.
        """
        if seconds <= 0 or not (work.prompt_tokens or work.rows):
            return
        self.last_seconds = seconds
        is_widened, parts = widening > 1, worthy_parts(work)
        if is_widened and parts in self._known_alone and self._has_seen(work):
            return
        seconds *= widening
        self._steps += 1
        key = _Key(parts if is_widened else None, _sizes(work))
        kind = self._kinds.pop(key, None) or _Kind()
        self._kinds[key] = kind
        kind.add(work, seconds, self._steps)
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if kind.counts and not is_widened:
            self._know_alone(parts)
        self._unfitted_steps += 1
        if kind.is_new or (kind.counts and self._unfitted_steps >= _FIT_EVERY):
            self._fit()

    def _has_seen(self, work: StepWork) -> bool:
        """Whether everything that this step is made of has been measured, however little of it."""
        speeds = self.speeds
        knows_prompts = speeds.prompts_known or not work.prompt_tokens
        return knows_prompts and (speeds.rows_known or not work.rows)

    def _know_alone(self, parts: Part) -> None:
        """Note that these parts could have had others' cores and were measured without them."""
        known = self._known_alone | parts
        if known != self._known_alone:
            self._known_alone = known
            self._kinds = {
                key: kind
                for key, kind in self._kinds.items()
                if key.widened_for is None or key.widened_for not in known
            }

    def _fit(self) -> None:
        self._unfitted_steps = 0
        kinds = [kind for kind in self._kinds.values() if kind.counts]
        samples = np.array([kind.median for kind in kinds])
        ages = self._steps - np.array([kind.seen_at for kind in kinds])
        weights = np.maximum(0.5 ** (ages / _HALF_LIFE_STEPS), _LEAST_WEIGHT)
        works, seconds = samples[:, :-1], samples[:, -1]
        # Errors count in relation to the expected time. In relation to the measured time, steps
        # from before the worker became slower would outweigh later ones.
        expected = np.clip(works @ self._costs, seconds / _MOST_WRONG, seconds * _MOST_WRONG)
        self._costs = _solve(works / expected[:, None], seconds / expected, weights)
        step, token, pair, row, row_pair = map(float, self._costs)
        self.speeds = StepSpeeds(
            seconds_per_step=step,
            seconds_per_token=token,
            seconds_per_pair=pair,
            seconds_per_row=row,
            seconds_per_row_pair=row_pair,
            chunk_tokens=self.speeds.chunk_tokens,
            prompts_known=bool(works[:, 1].any()),
            rows_known=bool(works[:, 3].any()),
        )


class _Key(NamedTuple):
    """The properties that steps of one kind have in common."""

    widened_for: Part | None
    """The parts for which they had others' cores; None: they had none."""
    sizes: tuple[int, ...]


class _Kind:
    """The last steps of one kind."""

    __slots__ = ("_samples", "median", "seen_at")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=_KEPT_SAMPLES)
        self.median: tuple[float, ...] = ()
        """The work and seconds of the step that has the median time a token."""
        self.seen_at = 0
        """The number of its latest step."""

    @property
    def counts(self) -> bool:
        """Whether it was seen often enough."""
        return len(self._samples) >= _FEWEST_SAMPLES

    @property
    def is_new(self) -> bool:
        """Whether its latest step made it count."""
        return len(self._samples) == _FEWEST_SAMPLES

    def add(self, work: StepWork, seconds: float, number: int) -> None:
        sample = 1, work.prompt_tokens, work.prompt_pairs, work.rows, work.row_pairs, seconds
        self._samples.append((seconds / (work.prompt_tokens + work.rows), sample))
        self.median = sorted(self._samples)[(len(self._samples) - 1) // 2][1]
        self.seen_at = number


def _sizes(work: StepWork) -> tuple[int, ...]:
    """Compute sizes that are equal if tokens, rows and contexts have the same numbers of bits."""
    tokens, rows = work.prompt_tokens, work.rows
    return (
        tokens.bit_length(),
        (work.prompt_pairs // tokens).bit_length() if tokens else 0,
        rows.bit_length(),
        (work.row_pairs // rows).bit_length() if rows else 0,
    )


def _solve(works: _Array, seconds: _Array, weights: _Array) -> _Array:
    """Solve for ``[5]`` costs, none below zero, with which `works` take about their `seconds`.

    Args:
        works: ``[kinds, 5]``.
        seconds: ``[kinds]``.
        weights: ``[kinds]``, of the squared errors.
    """
    scales = np.sqrt(weights @ works**2)
    used = np.flatnonzero(scales)
    costs = np.zeros(len(scales))
    while used.size:
        columns = works[:, used] / scales[used]
        gram = (columns * weights[:, None]).T @ columns
        gram[np.diag_indices_from(gram)] += _PENALTIES[used]
        fitted = np.linalg.solve(gram, columns.T @ (weights * seconds))
        if fitted.min() >= 0:
            costs[used] = fitted / scales[used]
            break
        used = np.delete(used, fitted.argmin())
    return costs
