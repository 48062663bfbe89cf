"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from kvrelay.deploy.models import resolve_model, users_models
from kvrelay.deploy.options import DEFAULT_MODEL

TESTS = Path(__file__).parent

# Here, because pytest asks for the profile before it reads the tests.
settings.register_profile("nightly", max_examples=6_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n`: what shares a Ray, or a file's models, is run by one process."""
    for item in items:
        file = item.path.relative_to(TESTS)
        group = "cluster" if file.parts[0] == "cluster" else str(file)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
