from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.environment import Environment


def test_the_cache_is_where_xdg_says():
    assert Environment.read({"XDG_CACHE_HOME": "/var/cache/me"}).cache_home == Path("/var/cache/me")


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": ""}])
def test_unset_means_the_home_folders_cache(variables: dict[str, str]):
    assert Environment.read(variables).cache_home == Path.home() / ".cache"


@pytest.mark.parametrize(("value", "token"), [("", None), ("a-token==", "a-token==")])
def test_the_token_is_there_or_not(value: str, token: str | None):
    environment = Environment.read({"KVRELAY_TOKEN": value})
    assert environment.token == token
    assert "a-token" not in repr(environment)


def test_a_token_that_is_none_is_refused_by_name_and_not_shown():
    with pytest.raises(DeployError, match=r"^KVRELAY_TOKEN: is not a token") as caught:
        Environment.read({"KVRELAY_TOKEN": "two words"})
    assert "two" not in str(caught.value)


def test_a_relative_cache_is_refused_by_name():
    with pytest.raises(DeployError, match="XDG_CACHE_HOME: 'here' is not an absolute path"):
        Environment.read({"XDG_CACHE_HOME": "here"})
