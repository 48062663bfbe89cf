from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.deploy.environment import Environment
from kvrelay.deploy.errors import DeployError


def test_the_cache_is_where_xdg_says():
    assert Environment.read({"XDG_CACHE_HOME": "/var/cache/me"}).cache_home == Path("/var/cache/me")


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": ""}])
def test_unset_means_the_home_folders_cache(variables: dict[str, str]):
    assert Environment.read(variables).cache_home == Path.home() / ".cache"


def test_a_relative_cache_is_refused_by_name():
    with pytest.raises(DeployError, match="XDG_CACHE_HOME: 'here' is not an absolute path"):
        Environment.read({"XDG_CACHE_HOME": "here"})
