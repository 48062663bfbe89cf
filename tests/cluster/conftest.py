"""One local Ray for all cluster tests; clusters come and go in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.converted import ConvertedModels
from kvrelay.deploy.environment import Environment
from kvrelay.deploy.local_ray import LocalRay
from kvrelay.deploy.models import convert, resolve_model
from kvrelay.deploy.options import DEFAULT_MODEL
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    with LocalRay(workers=8):
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, as `kvrelay serve` has it: converted once a machine."""
    models = ConvertedModels(Environment.read().cache_home / "kvrelay" / "models", convert)
    return resolve_model(DEFAULT_MODEL, "bfloat16", models, lambda _: None).path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")
