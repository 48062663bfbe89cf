"""One local Ray for all cluster tests; clusters come and go in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.nodes.local_ray import LocalRay
from kvrelay.deploy.nodes.local_ray import ray as ray_module
from kvrelay.deploy.nodes.worker_host import BUILDERS
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.cluster import obedient_worker
from tests.cluster.obedient_worker import ObedientHost, ObedientWorker


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    with LocalRay(workers=8):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def obedient_workers(ray) -> Iterator[None]:
    """Their code travels with them: Ray's processes do not have the tests on their path."""
    ray_module.cloudpickle.register_pickle_by_value(obedient_worker)
    with pytest.MonkeyPatch.context() as patch:
        for role in WorkerRole:
            patch.setitem(BUILDERS, role, ObedientWorker)
        patch.setattr("kvrelay.deploy.nodes.worker_host.WorkerHost", ObedientHost)
        yield
    ray_module.cloudpickle.unregister_pickle_by_value(obedient_worker)
