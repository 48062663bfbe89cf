"""One local Ray for all cluster tests; clusters come and go in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.local_ray import LocalRay
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    with LocalRay(workers=8):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")
