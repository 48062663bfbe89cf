from __future__ import annotations

import pytest

from kvrelay.deploy.deployment import loading_text


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ((0.0, 0.0), "0 of 2 loaded the model, 0 % of all weights are read"),
        ((1.0, 0.5), "1 of 2 loaded the model, 75 % of all weights are read"),
        ((1.0, 1.0), "2 of 2 loaded the model"),
    ],
)
def test_progress_is_told_in_weights_until_all_have_started(progress: tuple[float, ...], text: str):
    named = {f"decode-{number}": share for number, share in enumerate(progress)}
    assert loading_text(named) == text
