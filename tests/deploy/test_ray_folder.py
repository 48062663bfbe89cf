from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.nodes import local_ray
from kvrelay.deploy.nodes.local_ray import LocalRay
from kvrelay.deploy.nodes.ray_folder import RayFolder

KILLED = """
import os
from kvrelay.deploy.nodes.ray_folder import RayFolder

print(RayFolder().path)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one, as Ray's sockets need it; pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def left_by_a_killed_owner() -> Path:
    killed = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    return Path(killed.stdout.strip())


def test_what_a_killed_owner_left_goes_with_the_next_start(temp: Path):
    left = left_by_a_killed_owner()
    assert left.parent == temp
    assert left.is_dir()
    folder = RayFolder()
    assert list(temp.iterdir()) == [folder.path]
    folder.remove()
    assert list(temp.iterdir()) == []


def test_what_lives_was_kept_or_is_not_ours_stays(temp: Path):
    living, kept = RayFolder(), RayFolder()
    kept.keep()
    (temp / "kvrelay-notes").mkdir()
    (temp / "kvrelay-file").touch()
    (temp / "kvrelay-link").symlink_to(living.path)
    before = set(temp.iterdir())
    RayFolder().remove()
    assert set(temp.iterdir()) == before
    living.remove()


def test_another_users_folder_stays(monkeypatch: pytest.MonkeyPatch):
    left = left_by_a_killed_owner()
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    RayFolder().remove()
    assert left.is_dir()


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the folder is looked at: tests/cluster starts a Ray."""
    monkeypatch.setattr(local_ray.ray, "init", lambda **_: None)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)


def test_a_failure_keeps_the_logs_and_says_where(no_ray: None, temp: Path):
    with pytest.raises(ValueError, match="broken") as caught, LocalRay(1) as ray:
        raise ValueError("broken")
    [folder] = temp.iterdir()
    assert caught.value.__notes__ == [f"the logs are in {ray.logs}"]
    assert ray.logs.is_relative_to(folder)
    RayFolder().remove()
    assert folder.is_dir()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stop_leaves_nothing(no_ray: None, temp: Path, stop: type[BaseException]):
    with pytest.raises(stop), LocalRay(1):
        raise stop
    assert list(temp.iterdir()) == []


def test_a_stop_during_rays_shutdown_leaves_nothing(
    no_ray: None, temp: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_ray.ray, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt), LocalRay(1):
        pass
    assert list(temp.iterdir()) == []
