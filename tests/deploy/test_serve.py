"""What `kvrelay serve` refuses before it starts anything; tests/cluster tests what it starts."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands import serve as serve_module
from kvrelay.deploy.commands.serve import with_free_http
from kvrelay.deploy.errors import ModelError
from kvrelay.deploy.nodes import local_ray
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals
from tests.certificates import Authority
from tests.known import known


def serve(*arguments: str) -> Result:
    anywhere = [f"--{listener}=127.0.0.1:0" for listener in ("grpc", "http", "admin", "metrics")]
    return CliRunner().invoke(main, ["serve", *anywhere, *arguments])


@pytest.mark.parametrize("option", ["--grpc", "--http", "--admin", "--metrics"])
def test_a_port_in_use_is_said(option: str, no_release: None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        result = serve(option, taken)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kvrelay: {option}: cannot listen on {taken}")
    assert len(result.stderr.splitlines()) == 1


def test_http_goes_elsewhere_where_its_default_port_is_in_use(monkeypatch: pytest.MonkeyPatch):
    said = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = Address("127.0.0.1", listener.getsockname()[1])
        monkeypatch.setattr(serve_module, "DEFAULT_HTTP", taken)
        options = with_free_http(ServeOptions(http=taken), StartProgress(said))
    assert options.http == Address("127.0.0.1", 0)
    assert said.getvalue() == f"{taken} is in use: HTTP gets another port (--http chooses one).\n"
    assert with_free_http(ServeOptions(http=taken), StartProgress(said)).http == taken


def test_a_worker_metrics_port_in_use_is_said(no_release: None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = serve("--metrics", f"127.0.0.1:{port - 2}")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: --metrics: cannot listen on 127.0.0.1:")
    assert len(result.stderr.splitlines()) == 1


def test_a_port_that_an_ending_cluster_gives_back_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        release = threading.Timer(0.3, listener.close)
        release.start()
        address.check_free("--metrics")
    release.join()


def test_a_reachable_address_is_wrong_usage():
    result = serve("--grpc", "0.0.0.0:50051")
    assert result.exit_code == 2
    assert "--insecure" in result.stderr


FRONT = ("--front-tls-cert", "--front-tls-key")
CLUSTER = ("--tls-cert", "--tls-key", "--tls-ca")


@pytest.mark.parametrize("options", [FRONT, CLUSTER])
def test_a_file_that_is_not_there_is_said_of_its_option(tmp_path: Path, options: tuple[str, ...]):
    files = Authority(tmp_path).issue()
    missing = tmp_path / "missing"
    for wrong in options:
        issued = zip(options, (files.cert, files.key, known(files.ca)), strict=False)
        paths = {**dict(issued), wrong: missing}
        refused(wrong, f"{missing}: No such file or directory", *paths.items())


def test_files_that_do_not_match_are_said_of_their_option(tmp_path: Path):
    authority, stranger = Authority(tmp_path / "tls"), Authority(tmp_path / "other", "other")
    files, other = authority.issue(), authority.issue("second")
    elsewhere = authority.issue("elsewhere", host="worker.example")
    wrong_key = (("--front-tls-cert", files.cert), ("--front-tls-key", other.key))
    refused("--front-tls-key", f"{other.key}: is not the key of {files.cert}", *wrong_key)

    def cluster(cert: Path, key: Path, ca: Path) -> list[tuple[str, Path]]:
        return list(zip(CLUSTER, (cert, key, ca), strict=True))

    refused("--tls-key", "is not the key of", *cluster(files.cert, other.key, authority.ca))
    refused(
        "--tls-cert", f"checked with {stranger.ca}", *cluster(files.cert, files.key, stranger.ca)
    )
    refused("--tls-cert", "127.0.0.1", *cluster(elsewhere.cert, elsewhere.key, authority.ca))


def test_a_file_without_tokens_is_said_of_its_option(tmp_path: Path):
    empty = tmp_path / "tokens"
    empty.touch()
    refused("--auth-token-file", f"{empty}: contains no token", ("--auth-token-file", empty))


def refused(option: str, problem: str, *given: tuple[str, Path]) -> None:
    """Wrong usage, in one line of the option."""
    result = serve(*(str(word) for pair in given for word in pair))
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert line.startswith(f"Error: {option}: ")
    assert problem in line


def test_a_missing_model_is_one_line(tmp_path: Path):
    result = serve("--model", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr == (
        f"kvrelay: --model: {tmp_path}: no config.json, so this is not a checkpoint folder\n"
    )


def test_a_missing_draft_model_is_said_of_its_own_option(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    none = tmp_path / "none"
    none.mkdir()
    draft = ("--speculation", "draft", "--draft-model", str(none))
    result = serve("--model", str(tmp_path), *draft)
    assert result.exit_code == 1
    assert result.stderr == (
        f"kvrelay: --draft-model: {none}: no config.json, so this is not a checkpoint folder\n"
    )


def test_a_cache_that_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    result = serve()
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: XDG_CACHE_HOME: 'relative' is not an absolute path\n"


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = serve("--model", "owner/model")
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: the package huggingface_hub is missing\n"


def test_ray_that_started_meanwhile_ends_without_an_error_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
):
    """Otherwise it would keep its logs, and the message would name them."""
    left: list[object] = []

    @contextlib.contextmanager
    def start(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, error, traceback: left.append(error))
            yield SimpleNamespace(logs="here")

    monkeypatch.setattr(serve_module, "_ray", start)
    found: Future[ModelFolder] = Future()
    found.set_exception(ModelError("no such model"))
    progress = StartProgress(io.StringIO())
    with StopSignals() as signals, pytest.raises(ModelError):
        serve_module._run_cluster(ServeOptions(), found, progress, signals, debug=False)
    assert left == [None]


@pytest.mark.parametrize("cpus", [1, 2])
def test_processes_import_ahead_only_if_there_is_one_a_worker(
    monkeypatch: pytest.MonkeyPatch, cpus: int
):
    given: list[object] = []
    monkeypatch.setattr(local_ray, "LocalRay", lambda *_, preload, **__: given.append(preload))
    serve_module._ray(ServeOptions(worker_cpus=cpus), debug=False)
    assert [bool(preload) for preload in given] == [cpus == 1]


def test_debug_shows_the_traceback(tmp_path: Path):
    result = serve("--model", str(tmp_path), "--debug")
    assert result.exit_code == 1
    assert result.exc_info is not None
    assert "no config.json" in str(result.exception)


def test_a_signal_during_the_stop_changes_nothing():
    with StopSignals() as signals:
        signals.stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is signal.SIGINT


SLOW_TO_STOP = """
import time
from kvrelay.deploy.stop_signals import StopSignals

with StopSignals():
    try:
        print("up", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        print("stopping", flush=True)
        time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_does_not_wait(number: signal.Signals):
    command = [sys.executable, "-c", SLOW_TO_STOP]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.kill(process.pid, number)
        assert process.stdout.readline() == b"stopping\n"
        os.kill(process.pid, number)
        assert process.wait(60) == 128 + number
