"""What `kvrelay router` is told, and what it checks of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrelay.deploy.cli import main
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options import RouterProcessOptions
from tests.certificates import Authority


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RouterProcessOptions]:
    """The options of the routers that would have run."""
    told: list[RouterProcessOptions] = []
    monkeypatch.setattr("kvrelay.deploy.router.run", lambda options, *_: told.append(options))
    return told


def test_a_router_has_the_clusters_certificates_wherever_workers_listen(
    told: list[RouterProcessOptions], tmp_path: Path
):
    files = Authority(tmp_path).issue(host="worker.kv")
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    for named in ([], ["--tls-name", "worker.kv"], ["--tls-name", "only.workers.kv"]):
        result = CliRunner().invoke(main, ["router", *tls, *named])
        assert result.exit_code == 0, result.output
        cluster_tls = told[-1].cluster_tls
        assert cluster_tls is not None
        assert cluster_tls.name == (named[-1] if named else None)
        told[-1].check_files()


@pytest.mark.parametrize("port", [50052, 9401, 9402])
@pytest.mark.parametrize("option", ["--grpc", "--http"])
def test_a_router_has_neither_operators_nor_workers_ports(
    told: list[RouterProcessOptions], option: str, port: int
):
    result = CliRunner().invoke(main, ["router", option, f"127.0.0.1:{port}"])
    assert result.exit_code == 0, result.output
    assert told[-1].worker_metrics() == ()


def test_a_routers_own_ports_differ(told: list[RouterProcessOptions]):
    for option in ("--http", "--metrics"):
        result = CliRunner().invoke(
            main, ["router", "--grpc", "127.0.0.1:7", option, "127.0.0.1:7"]
        )
        assert isinstance(result.exception, SystemExit | OptionError)
        assert option in result.output
    assert not told
