"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from kvrelay.deploy.models import resolve_model, users_models
from kvrelay.deploy.options import DEFAULT_MODEL

CLUSTER = Path(__file__).parent / "cluster"

# Here, because pytest asks for the profile before it reads the tests.
settings.register_profile("nightly", max_examples=6_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters are processes enough for a machine: nothing else runs beside them.

    But those of workers that compute nothing: their tests wait most of the time.
    """
    for item in items:
        waits = "obedient_workers" in getattr(item, "fixturenames", ())
        if item.path.is_relative_to(CLUSTER) and not waits:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
