"""What `kvrelay drain` prints, and how it ends; tests/cluster drains real workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc as rpc

Response = pb.DrainWorkerResponse
STEPS = [
    Response(phase=Response.PHASE_DRAINING, incarnation="decode-0-a", requests=3),
    Response(phase=Response.PHASE_DRAINING, incarnation="decode-0-a", requests=1),
    Response(phase=Response.PHASE_LEFT, incarnation="decode-0-a"),
    Response(phase=Response.PHASE_READY, incarnation="decode-0-b"),
]


class ScriptedAdmin(rpc.AdminServiceServicer):
    """Tells of these steps, whatever it is asked for."""

    def __init__(self, steps: list[pb.DrainWorkerResponse]) -> None:
        self.steps = steps
        self.requests: list[pb.DrainWorkerRequest] = []

    def DrainWorker(self, request, context):  # noqa: N802 (gRPC's name)
        self.requests.append(request)
        yield from self.steps


@contextmanager
def serving(admin: ScriptedAdmin) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def drain(admin: ScriptedAdmin, *arguments: str) -> Result:
    with serving(admin) as address:
        return CliRunner().invoke(main, ["drain", "decode-0", "--admin", address, *arguments])


def test_each_step_is_a_line_and_the_successor_the_last():
    admin = ScriptedAdmin(STEPS)
    result = drain(admin)
    assert result.exit_code == 0
    assert result.stdout == (
        "decode-0 drains, 3 requests left  (decode-0-a)\n"
        "decode-0 drains, 1 requests left  (decode-0-a)\n"
        "decode-0 has left; another one starts  (decode-0-a)\n"
        "decode-0 is ready again  (decode-0-b)\n"
    )
    assert admin.requests == [pb.DrainWorkerRequest(worker="decode-0")]


def test_a_removed_worker_has_no_successor():
    admin = ScriptedAdmin(STEPS[:3])
    result = drain(admin, "--remove")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "decode-0 has left  (decode-0-a)"
    assert admin.requests[0].remove


@pytest.mark.parametrize("heard", [0, 1, 3])
def test_a_stream_that_ends_too_early_is_a_failure(heard: int):
    result = drain(ScriptedAdmin(STEPS[:heard]))
    assert result.exit_code == 1
    assert "the connection ended before decode-0 had drained" in result.stderr
