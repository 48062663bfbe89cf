"""What `kvrelay roll` asks for and prints, and how it ends; tests/cluster rolls real clusters."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands.controller_status import as_text
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.wire.cluster_state import ClusterState, RollState, WorkerPhase, WorkerState
from kvrelay.wire.messages import CLUSTER_STATE
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_drain import ScriptedAdmin, serving

Phase = pb.ScaleWorkersResponse


class RollingAdmin(ScriptedAdmin):
    """Tells of these steps, whatever it is asked for."""

    def __init__(self, *steps: pb.RollWorkersResponse) -> None:
        super().__init__([])
        self.roll_steps = steps
        self.asked: list[pb.RollWorkersRequest] = []

    def RollWorkers(self, request, context):  # noqa: N802 (gRPC's name)
        self.asked.append(request)
        yield from self.roll_steps


def roll(admin: RollingAdmin, *arguments: str) -> Result:
    with serving(admin) as address:
        return CliRunner().invoke(main, ["roll", "--admin", address, *arguments])


def test_options_are_passed_on_and_each_step_is_a_line():
    admin = RollingAdmin(
        pb.RollWorkersResponse(worker="decode-1", phase=Phase.PHASE_STARTING),
        pb.RollWorkersResponse(worker="decode-1", phase=Phase.PHASE_READY),
        pb.RollWorkersResponse(worker="decode-0", phase=Phase.PHASE_LEFT),
    )
    options = ["--set", "kv-memory=2GiB", "--set", "chunk_tokens=7"]
    result = roll(admin, *options, "--max-surge", "0", "--max-unavailable", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "decode-1 starts\ndecode-1 is ready\ndecode-0 has left\n"
    given = {"kv-memory": "2GiB", "chunk_tokens": "7"}
    assert admin.asked == [pb.RollWorkersRequest(options=given, max_unavailable=2)]


def test_one_successor_at_a_time_if_nothing_else_is_said_and_undo_has_no_options():
    admin = RollingAdmin()
    result = roll(admin, "--undo")
    assert (result.exit_code, result.stdout) == (0, "All workers have these options already.\n")
    assert admin.asked == [pb.RollWorkersRequest(max_surge=1, undo=True)]
    for arguments, why in (
        (["--undo", "--set", "threads=2"], "give --set or --undo"),
        (["--set", "threads"], "--set: must be OPTION=VALUE, got 'threads'"),
        (["--max-surge", "-1"], "--max-surge"),
    ):
        result = roll(admin, *arguments)
        assert result.exit_code == 2
        assert why in result.stderr
    assert len(admin.asked) == 1


def test_a_roll_that_stops_says_why_and_how_to_go_back():
    step = pb.RollWorkersResponse(worker="decode-1", phase=Phase.PHASE_FAILED, reason="no room")
    result = roll(RollingAdmin(step))
    assert result.exit_code == 1
    assert result.stdout == "decode-1 FAILED: no room\n"
    assert "the roll has stopped; `kvrelay roll --undo` goes back" in result.stderr


WORKERS = tuple(
    WorkerState(name, WorkerRole.DECODE, WorkerPhase.LIVE, name, "10.0.0.2:5", "n", 9, revision=n)
    for name, n in (("decode-0", 0), ("decode-2", 1))
)


@pytest.mark.parametrize("failed", ["", "no room"])
def test_the_status_of_a_controller_says_how_far_a_roll_is(failed: str):
    rolling = RollState(1, 1, 2, {"kv_memory": "2GiB", "chunk_tokens": "7"}, failed)
    state = ClusterState("default", 3, True, False, 7, 12.3, WORKERS, rolling)
    assert CLUSTER_STATE.from_message(CLUSTER_STATE.to_message(state)) == state
    _, line, *rest = as_text(state).splitlines()
    assert line == (
        "  roll to revision 1 (chunk_tokens=7, kv_memory=2GiB): 1 of 2 workers are replaced"
    )
    stopped = ["  it HAS STOPPED: no room (`kvrelay roll --undo` goes back)"] if failed else []
    assert rest == [
        *stopped,
        "  decode-0     live       revision 0  decode-0  10.0.0.2:5  process 9 on n",
        "  decode-2     live       revision 1  decode-2  10.0.0.2:5  process 9 on n",
    ]
