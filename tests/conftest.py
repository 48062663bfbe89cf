"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from kvrelay.deploy.models import resolve_model, users_models
from kvrelay.deploy.options import DEFAULT_MODEL

# Here, because pytest asks for the profile before it reads the tests.
settings.register_profile("nightly", max_examples=6_000)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
