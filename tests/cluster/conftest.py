"""One local Ray for all cluster tests; clusters come and go in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.local_ray import LocalRay
from kvrelay.deploy.models import resolve_model, users_models
from kvrelay.deploy.options import DEFAULT_MODEL
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    with LocalRay(workers=8):
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    return resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")
