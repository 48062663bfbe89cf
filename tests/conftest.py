"""What tests of several rooms share."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.environment import set_process_variables
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.text import grammar_checker
from tests import collected_in_turn
from tests.pairwise import mark_what_pairs_leave_out

set_process_variables()  # whichever test imports Ray first
TESTS = Path(__file__).parent
CLUSTER = TESTS / "cluster"
WITH_RAY = frozenset(
    {
        "cluster/test_supervision.py",
        "cluster/test_controller.py",
        "cluster/test_leases.py",
        "cluster/test_locked_cluster.py",
        "cluster/test_model_copy.py",
        "cluster/test_serve_command.py",
        "cluster/test_scale.py",
    }
)
"""Files whose tests in `make test` have workers in processes of their own."""
FIRST = (
    "model_runner/test_attention.py",
    "cluster/test_supervision.py",
    "mem_cache/test_planted_faults.py",
    "engine/test_host_windows.py",
    "engine/test_session_matrix.py",
    "mem_cache/test_memory_model.py",
)
"""Files that begin first: whose tests compute or wait for long, so that no core idles at the end.

The first of all compiles what others then find in the cache of kernels. With the second come all
that need a Ray.
"""
CLUSTER_PART = 0.8
"""Of all other files; among these those of clusters are spread, as their tests wait most of the
time: the tests beside them had better compute."""

BUSY_SECONDS = 120.0

# Here, because pytest asks for the profile before it reads the tests.
settings.register_profile("nightly", max_examples=6_000)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(collected_in_turn)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests are asked for that are alone, files that have none are not imported."""
    if not config.option.markexpr.startswith("alone") or collection_path.suffix != ".py":
        return None
    slow = CLUSTER in collection_path.parents and "not slow" not in config.option.markexpr
    return None if slow or "mark.alone" in collection_path.read_text() else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays: to look for garbage in it took a third of the time.

    Nor do the tests look through it later, when each of them leaves garbage of its own.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Otherwise libraries report as leaked what Python cannot collect at the end."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before those go that were not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests of clusters of Ray are alone; the others wait most of the time for processes."""
    mark_what_pairs_leave_out(items)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        computes = "ray" in fixtures and "obedient_workers" not in fixtures
        if item.path.is_relative_to(CLUSTER) and computes and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.alone)
    if not config.option.markexpr.startswith("not alone"):
        return  # one after the other, in the order in which they lie
    files = [*dict.fromkeys(item.path for item in items)]
    clusters = [path for path in files if path.is_relative_to(CLUSTER)]
    others = [path for path in files if not path.is_relative_to(CLUSTER)]
    places = {path: CLUSTER_PART * place / len(clusters) for place, path in enumerate(clusters)}
    places |= {path: place / len(others) for place, path in enumerate(others)}
    places |= {TESTS / name: place - len(FIRST) for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places[item.path])


class OneRay(collected_in_turn.FilesInTurn):
    """One worker of pytest's has all files that need a Ray, which takes long to start."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ray" if file.removeprefix("tests/") in WITH_RAY else file


@pytest.hookimpl(optionalhook=True)  # pytest may run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneRay | None:
    return OneRay(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def time_on_a_busy_machine() -> Iterator[None]:
    """Let HTTP clients wait longer for an answer, and routers for a grammar's check.

    Tests beside may have the processor for seconds. A test may still set a time of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for client in (httpx.Client, httpx.AsyncClient):
            patch.setitem(client.__init__.__kwdefaults__, "timeout", BUSY_SECONDS)
        patch.setattr(grammar_checker, "_CHECK_SECONDS", BUSY_SECONDS)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
