"""Run the load generator against the running cluster, or against one started for it.

python -m benchmarks.with_cluster [options of kvrelay serve] -- [options of kvrelay bench]

The running cluster is the one at the load generator's --target, or else at the
--grpc that `kvrelay serve` would take. Where none answers there, one is started
with the given options, and stopped afterwards.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TextIO

import click
import grpc
from click.core import ParameterSource

from kvrelay.client.access import open_channel
from kvrelay.deploy.commands.bench import bench
from kvrelay.deploy.commands.serve import serve
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.reach.grpc_target import CommandAccess, connected
from kvrelay.v1 import inference_pb2 as pb

START_SECONDS = 900.0
"""For a cluster to get ready, with the first download of its model."""
READY_SECONDS = 60.0
"""For the workers of a running cluster, some of which may be restarting."""
_GRPC_LINE = re.compile(r"  gRPC +(\S+)\n")
_HTTP_LINE = re.compile(r"  HTTP +(http\S+)\n")
_READY_LINE = "Ctrl-C stops it.\n"


def main() -> None:
    """Split the arguments at ``--``, find or start the cluster, and run the load generator."""
    interrupt_on_signals()
    try:
        run(*split(sys.argv[1:]))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (DeployError, TimeoutError) as error:
        sys.exit(f"make bench: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run(serve_options: Sequence[str], load_options: Sequence[str]) -> None:
    """Run the load generator against the cluster that the options mean; exits as it does."""
    # The commands parse their options themselves, --config too; a wrong one raises here.
    address: Address = serve.make_context("kvrelay serve", list(serve_options)).params["grpc"]
    load = bench.make_context("kvrelay bench", list(load_options))
    if load.get_parameter_source("target") is not ParameterSource.DEFAULT:
        bench(load_options)
    told = load.params
    access = CommandAccess.given(told["token_file"], told["ca"], tls=told["tls"])
    if address.port and _answers(address, access):
        _await_workers(address, access)
        bench([*load_options, "--target", str(address)])
    with started(serve_options) as cluster:
        bench([*load_options, "--target", cluster.target])


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is before ``--`` and what is behind it."""
    if "--" not in arguments:
        raise click.UsageError("give options of kvrelay serve, --, and the benchmark's own")
    middle = arguments.index("--")
    return arguments[:middle], arguments[middle + 1 :]


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP stop what was started, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _answers(address: Address, access: CommandAccess) -> bool:
    """Whether a gRPC server listens there, with TLS if `access` says so."""
    with open_channel(str(address), access.credentials()) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=1.0)
        except grpc.FutureTimeoutError:
            return False
    return True


def _await_workers(address: Address, access: CommandAccess) -> None:
    """Wait until all workers of a running cluster are ready and can serve requests."""
    deadline = time.monotonic() + READY_SECONDS
    pair = {pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE}
    access.check(address)
    with connected(address, access.credentials()) as service:
        while True:
            info = service.GetServerInfo(
                pb.GetServerInfoRequest(), timeout=5.0, metadata=access.metadata
            )
            workers = info.workers
            roles = {one.role for one in workers}
            can_serve = roles >= pair or pb.WORKER_ROLE_AGGREGATED in roles
            if can_serve and all(one.ready for one in workers):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address}: not all workers are ready")
            time.sleep(0.2)


@dataclass(frozen=True)
class Started:
    """A `kvrelay serve` whose workers are all ready."""

    target: str
    """Its gRPC address."""
    url: str
    """Of its HTTP API."""
    pid: int


@contextmanager
def started(options: Sequence[str], echo_to: TextIO | None = None) -> Iterator[Started]:
    """Run `kvrelay serve` in this context; what it prints goes on to `echo_to`, or stdout.

    It runs in a session of its own, so that a terminal's Ctrl-C reaches it once,
    from here. A second Ctrl-C is passed on as well, and ends it at once.
    """
    command = [sys.executable, "-m", "kvrelay.deploy", "serve", *options]
    server = subprocess.Popen(  # noqa: S603 (our own command)
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    ready: Future[tuple[str, str]] = Future()
    echo = threading.Thread(target=_echo, args=(server, ready, echo_to), daemon=True)
    echo.start()
    try:
        yield Started(*ready.result(START_SECONDS), server.pid)
    finally:
        _stop(server)
        echo.join()
        assert server.stdout is not None
        server.stdout.close()


def _echo(server: subprocess.Popen[str], ready: Future[tuple[str, str]], to: TextIO | None) -> None:
    """Print what the server prints; `ready` gets the addresses that it names."""
    assert server.stdout is not None
    address = url = ""
    for line in server.stdout:
        print(line, end="", flush=True, file=to)
        if found := _GRPC_LINE.fullmatch(line):
            address = found[1]
        if found := _HTTP_LINE.fullmatch(line):
            url = found[1]
        if line == _READY_LINE:
            ready.set_result((address, url))
    if not ready.done():
        ready.set_exception(DeployError("the cluster did not start"))


def _stop(server: subprocess.Popen[str]) -> None:
    while server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    main()
