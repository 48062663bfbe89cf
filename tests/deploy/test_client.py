"""How the commands get into a cluster that is locked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.reach.grpc_target import CommandAccess
from kvrelay.net.tls import CurrentTls, TlsFiles
from tests.certificates import Authority

from .conftest import Kvrelay
from .scripted_service import ScriptedService, serving

COMMANDS = [("generate", "x"), ("status",)]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# mine\nfirst\nsecond\n")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_call_brings_the_files_first_token(
    kvrelay: Kvrelay, service: ScriptedService, tokens: Path, command: tuple[str, ...]
):
    assert kvrelay(*command, "--token-file", str(tokens)).exit_code == 0
    assert set(service.authorizations) == {"Bearer first"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_token_may_be_in_the_environment(
    kvrelay: Kvrelay,
    service: ScriptedService,
    tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
):
    kvrelay(*command)
    assert set(service.authorizations) == {None}
    service.authorizations.clear()
    monkeypatch.setenv("KVRELAY_TOKEN", "from-the-environment")
    kvrelay(*command)
    assert set(service.authorizations) == {"Bearer from-the-environment"}
    service.authorizations.clear()
    kvrelay(*command, "--token-file", str(tokens))
    assert set(service.authorizations) == {"Bearer first"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_with_tls_is_reached_by_its_authority(tmp_path: Path, command: tuple[str, ...]):
    files = Authority(tmp_path / "tls").issue()
    stranger = Authority(tmp_path / "other").ca
    service = ScriptedService()
    with serving(
        service, CurrentTls(TlsFiles(files.cert, files.key)).server_credentials()
    ) as address:
        assert run(*command, "--server", address, "--ca", str(files.ca)).exit_code == 0
        for other in ((), ("--tls",), ("--ca", str(stranger))):
            result = run(*command, "--server", address, *other)
            assert result.exit_code == 1
            assert result.stderr.startswith(f"kvrelay: {address}: UNAVAILABLE: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_no_use_are_named(tmp_path: Path, command: tuple[str, ...]):
    for option in ("--token-file", "--ca"):
        missing = tmp_path / "missing"
        result = run(*command, option, str(missing))
        assert result.exit_code == 2
        assert f"Error: {option}: {missing}: No such file or directory" in result.stderr
    empty = tmp_path / "empty"
    empty.touch()
    for option, what in (("--token-file", "token"), ("--ca", "PEM certificate")):
        result = run(*command, option, str(empty))
        assert result.exit_code == 2
        assert f"Error: {option}: {empty}: contains no {what}" in result.stderr


def test_status_needs_all_three_files_for_the_workers(tmp_path: Path):
    files = Authority(tmp_path).issue()
    result = run("status", "--tls-cert", str(files.cert), "--tls-key", str(files.key))
    assert result.exit_code == 2
    assert "Error: --tls-ca: must be given with --tls-cert" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_token_in_the_environment_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    monkeypatch.setenv("KVRELAY_TOKEN", "two words")
    result = run(*command)
    assert result.exit_code == 2
    assert "Error: KVRELAY_TOKEN: is not a token" in result.stderr
    assert "two" not in result.stderr


def test_a_token_does_not_travel_in_plain_text():
    elsewhere, here = Address("192.0.2.1", 50051), Address("127.0.0.1", 50051)
    with pytest.raises(DeployError, match=r"^192\.0\.2\.1:50051: .* plain text: give --ca"):
        CommandAccess(token="secret").check(elsewhere)
    CommandAccess(token="secret").check(here)
    CommandAccess(token="secret", tls=True).check(elsewhere)
    CommandAccess().check(elsewhere)
    assert "secret" not in repr(CommandAccess(token="secret"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("command", ["drain", "generate", "status"])
def test_a_client_command_starts_without_ray_and_torch(command: str):
    """They take seconds to import, and Ray's driver shows the workers' logs."""
    module = f"kvrelay.deploy.commands.{command}"
    code = f"import sys, {module}; print({{'ray', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
