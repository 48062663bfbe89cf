"""What tests of several rooms share."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from kvrelay.deploy.models import resolve_model, users_models
from kvrelay.deploy.options import DEFAULT_MODEL

TESTS = Path(__file__).parent
CLUSTER = TESTS / "cluster"
FIRST = (
    "model_runner/test_attention.py",
    "cluster/test_supervision.py",
    "mem_cache/test_planted_faults.py",
    "cluster/test_leases.py",
    "engine/test_virtual_time.py",
    "mem_cache/test_memory_model.py",
    "cluster/test_scale.py",
)
"""Files that begin first: whose tests compute or wait for long, so that no core idles at the end.

The first of all compiles what others then find in the cache of kernels.
"""

# Here, because pytest asks for the profile before it reads the tests.
settings.register_profile("nightly", max_examples=6_000)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests are asked for that are alone, files that have none are not imported."""
    if not config.option.markexpr.startswith("alone") or collection_path.suffix != ".py":
        return None
    may_have = CLUSTER in collection_path.parents or "mark.alone" in collection_path.read_text()
    return None if may_have else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays: to look for garbage in it took a third of the time.

    Nor do the tests look there later, when each of them leaves garbage of its own.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters of Ray are processes enough for a machine: nothing else runs beside them.

    But those of workers that compute nothing: their tests wait most of the time.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        computes = "ray" in fixtures and "obedient_workers" not in fixtures
        if item.path.is_relative_to(CLUSTER) and computes:
            item.add_marker(pytest.mark.alone)
    order = {TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
