"""What `kvrelay shift` asks for, refuses and prints; tests/cluster shifts real routers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc, controller_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState, WorkerPhase, WorkerState
from kvrelay.wire.messages import CLUSTER_STATE
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_drain import ScriptedAdmin


def workers(cluster: str, model: str = "abc") -> tuple[WorkerState, ...]:
    return tuple(
        WorkerState(
            f"{role}-0", role, WorkerPhase.LIVE, incarnation=f"{role}-0-{cluster}", model=model
        )
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
    )


OLD = ClusterState("a", 1, True, False, 7, 1.0, workers("a"), version=VERSION, routers=2)
NEW = ClusterState("b", 1, True, False, 8, 1.0, workers("b"), version=VERSION)


class Controller(ScriptedAdmin, controller_pb2_grpc.ControllerServiceServicer):
    """Its routers follow one after the other, each time that it is asked how it is.

    Args:
        state: before anybody has asked for anything.
        follow: how many of the routers ever do; also when they are led back.
    """

    def __init__(self, state: ClusterState, follow: int = 99) -> None:
        left = pb.DrainWorkerResponse(phase=pb.DrainWorkerResponse.PHASE_LEFT, incarnation="x")
        super().__init__([left])
        self.now = state
        self.follow = follow
        self.away = 0
        """How many questions find no controller, after a shift was ordered."""
        self.successors: list[str] = []

    def ShiftRouters(self, request, context):  # noqa: N802 (gRPC's name)
        self.successors.append(request.successor)
        away = 0 if request.successor else self.now.routers_shifted
        self.now = replace(self.now, successor=request.successor, routers_shifted=away)
        return pb.ShiftRoutersResponse()

    def GetCluster(self, request, context):  # noqa: N802
        if self.successors and self.away:
            self.away -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "it starts again")
        answer = self.now
        if self.now.successor:
            shifted = min(self.now.routers_shifted + 1, self.now.routers, self.follow)
        else:
            shifted = max(self.now.routers_shifted - 1, self.now.routers - self.follow, 0)
        if self.successors:
            self.now = replace(self.now, routers_shifted=shifted)
        return CLUSTER_STATE.to_message(answer)


@contextlib.contextmanager
def serving(controller: Controller) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(controller, server)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def both(old: Controller, new: Controller) -> Iterator[list[str]]:
    with serving(old) as where, serving(new) as to:
        yield ["shift", "--controller", where, "--to", to]


def run(arguments: list[str]) -> Result:
    return CliRunner().invoke(main, arguments)


def test_all_routers_have_followed_before_the_old_workers_drain():
    old, new = Controller(OLD), Controller(NEW)
    with both(old, new) as words:
        result = run([*words, "--drain"])
    assert result.exit_code == 0, result.output
    assert old.successors == [words[-1]]
    assert new.successors == []
    assert old.now.routers_shifted == 2
    first, *left, last = result.stdout.splitlines()
    assert first == f"New requests of all 2 routers go to the workers of {words[-1]}."
    assert sorted(left) == [f"{one} has left  (x)" for one in ("decode-0", "prefill-0")]
    assert last == "All workers have left; `kvrelay down` ends the rest of the cluster."
    assert sorted((one.worker, one.remove) for one in old.requests) == [
        ("decode-0", True),
        ("prefill-0", True),
    ]


def test_a_controller_that_starts_again_meanwhile_is_asked_again():
    old = Controller(OLD)
    old.away = 2
    with both(old, Controller(NEW)) as words:
        result = run([*words, "--drain"])
    assert result.exit_code == 0, result.output
    assert (old.away, len(old.requests)) == (0, 2)


def test_a_controller_that_stays_away_is_told_of():
    old = Controller(OLD)
    old.away = 1 << 30
    with both(old, Controller(NEW)) as words:
        result = run([*words, "--drain", "--timeout", "0.5"])
    assert result.exit_code == 1
    assert "UNAVAILABLE: it starts again" in result.stderr
    assert not old.requests


def test_nothing_is_drained_if_a_router_does_not_follow():
    old = Controller(OLD, follow=1)
    with both(old, Controller(NEW)) as words:
        result = run([*words, "--drain", "--timeout", "0.5"])
    assert result.exit_code == 1
    assert "1 of 2 routers have not followed within 0.5 s (--timeout)" in result.stderr
    assert not old.requests


def test_the_command_ends_when_all_routers_have_been_led_back():
    old = Controller(replace(OLD, successor="10.0.0.1:5", routers_shifted=2))
    with serving(old) as where:
        result = run(["shift", "--controller", where, "--back"])
    assert (result.exit_code, old.successors) == (0, [""])
    assert old.now.routers_shifted == 0
    assert result.stdout == f"New requests go to the workers of {where}.\n"


def test_a_router_that_does_not_come_back_is_told_of():
    old = Controller(replace(OLD, successor="10.0.0.1:5", routers_shifted=2), follow=1)
    with serving(old) as where:
        result = run(["shift", "--controller", where, "--back", "--timeout", "0.5"])
    assert (result.exit_code, old.successors) == (1, [""])
    assert "1 of 2 routers have not followed within 0.5 s (--timeout)" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (replace(NEW, version="9.9 (00c0ffee)"), r"is of 9.9 (00c0ffee), that of {where} of 0.1.0"),
        (replace(NEW, version=""), r"is of an earlier version, that of {where} of 0.1.0"),
        (replace(NEW, workers=workers("b", "xyz")), r"has loaded another model (xyz) than that of"),
        (replace(NEW, workers=()), r"has no workers that have started"),
        (
            replace(NEW, successor="10.0.0.1:5"),
            r"leads its routers to 10.0.0.1:5; --back ends that",
        ),
        (OLD, r"{to} and {where} are one controller"),
    ],
)
def test_a_cluster_that_cannot_take_over_is_refused_and_nobody_is_told(new: ClusterState, why: str):
    old = Controller(OLD)
    with both(old, Controller(new)) as words:
        result = run(words)
        said = why.format(where=words[2], to=words[4])
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())
    assert not old.successors


@pytest.mark.parametrize("arguments", [[], ["--back", "--drain"], ["--to", "h:1", "--back"]])
def test_wrong_usage(arguments: list[str]):
    result = run(["shift", *arguments])
    assert result.exit_code == 2
    assert "give --to, perhaps with --drain, or --back" in result.stderr
