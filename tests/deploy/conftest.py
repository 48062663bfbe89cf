from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main

from .scripted_service import ScriptedService, serving

Kvrelay = Callable[..., Result]
"""Runs a command against the scripted service."""


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def server(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def kvrelay(server: str) -> Kvrelay:
    def invoke(command: str, *arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(main, [command, "--server", server, *arguments], input=stdin)

    return invoke


@pytest.fixture
def no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port that is in use is waited for."""
    monkeypatch.setattr("kvrelay.deploy.options.listen_address.RELEASE_SECONDS", 0)
