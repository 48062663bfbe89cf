"""What `kvrelay router` is told, and what it checks of that."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands.router import _discovery, _route
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import RouterProcessOptions
from kvrelay.deploy.reach.find_controller import Controller
from kvrelay.deploy.reach.grpc_target import OPEN
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals
from tests.certificates import Authority
from tests.checkpoints import make_tokenizer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RouterProcessOptions]:
    """The options of the routers that would have run."""
    told: list[RouterProcessOptions] = []
    monkeypatch.setattr(
        "kvrelay.deploy.commands.router.run", lambda options, *_: told.append(options)
    )
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


async def test_a_router_says_that_it_is_not_ready_while_the_controller_is_away(tmp_path: Path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    anywhere = Address("127.0.0.1", 0)
    options = RouterProcessOptions(grpc=anywhere, http=anywhere, metrics=anywhere)
    discovery = _discovery(Controller(Address("127.0.0.1", 1)), OPEN)
    said = io.StringIO()
    routing = asyncio.create_task(
        _route(
            options, ModelFolder("none", tmp_path), discovery, StartProgress(said), StopSignals()
        )
    )
    try:
        async with asyncio.timeout(60):
            while not (listens := re.search(r"listening on (\S+)", said.getvalue())):
                await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(listens[1]) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                answer = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "Ready" not in said.getvalue()
    finally:
        routing.cancel()
        await asyncio.gather(routing, return_exceptions=True)
    assert routing.cancelled()
