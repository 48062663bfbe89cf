"""What `kvrelay serve` refuses before it starts anything; tests/cluster tests what it starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.stop_signals import StopSignals


def serve(*arguments: str) -> Result:
    anywhere = ("--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    return CliRunner().invoke(main, ["serve", *anywhere, *arguments])


@pytest.mark.parametrize("option", ["--grpc", "--metrics"])
def test_a_port_in_use_is_said_at_once(option: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        result = serve(option, taken)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kvrelay: {option}: cannot listen on {taken}")
    assert len(result.stderr.splitlines()) == 1


def test_a_worker_metrics_port_in_use_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = serve("--metrics", f"127.0.0.1:{port - 2}")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: --metrics: cannot listen on 127.0.0.1:")
    assert len(result.stderr.splitlines()) == 1


def test_a_reachable_address_is_wrong_usage():
    result = serve("--grpc", "0.0.0.0:50051")
    assert result.exit_code == 2
    assert "--insecure" in result.stderr


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
        assert process.wait(10) == 128 + number
