"""Who is retracted when memory is short: who loses least, but never the first in line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.engine.scheduler.running_batch import choose_victim


def running(*requests: tuple[float, int, int]) -> Any:
    """Requests by their arrival, their output's and their prompt's length."""
    return [
        SimpleNamespace(turn=(0, arrived), output_ids=[0] * output, prompt_ids=[0] * prompt)
        for arrived, output, prompt in requests
    ]


@pytest.mark.parametrize(
    ("requests", "victim"),
    [
        ([(1.0, 5, 9), (2.0, 3, 9), (3.0, 4, 9)], 1),
        ([(1.0, 5, 9), (2.0, 3, 8), (3.0, 3, 9)], 2),
        ([(3.0, 5, 9), (1.0, 0, 9), (2.0, 4, 9)], 2),
        ([(1.0, 0, 9)], 0),
    ],
    ids=["fewest tokens", "longest prompt", "a retry that came first", "alone"],
)
def test_the_first_in_line_is_kept(requests: list[tuple[float, int, int]], victim: int) -> None:
    made = running(*requests)
    assert choose_victim(made) is made[victim]
