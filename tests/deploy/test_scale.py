"""What `kvrelay scale` prints, and how it ends; tests/cluster scales real clusters."""

from __future__ import annotations

from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.v1 import admin_pb2 as pb
from tests.deploy.test_drain import ScriptedAdmin, serving

Response = pb.ScaleWorkersResponse


class ScalingAdmin(ScriptedAdmin):
    """Tells of these steps, whatever it is asked for."""

    def __init__(self, *steps: pb.ScaleWorkersResponse) -> None:
        super().__init__([])
        self.scale_steps = steps
        self.asked: list[pb.ScaleWorkersRequest] = []

    def ScaleWorkers(self, request, context):  # noqa: N802 (gRPC's name)
        self.asked.append(request)
        yield from self.scale_steps


def scale(admin: ScalingAdmin, *arguments: str) -> Result:
    with serving(admin) as address:
        return CliRunner().invoke(main, ["scale", "--admin", address, *arguments])


def test_each_step_is_a_line():
    admin = ScalingAdmin(
        Response(worker="decode-1", phase=Response.PHASE_STARTING),
        Response(worker="decode-1", phase=Response.PHASE_READY),
        Response(worker="prefill-1", phase=Response.PHASE_DRAINING),
        Response(worker="prefill-1", phase=Response.PHASE_LEFT),
    )
    result = scale(admin, "--decode", "2", "--prefill", "1")
    assert result.exit_code == 0
    assert result.stdout == (
        "decode-1 starts\ndecode-1 is ready\nprefill-1 drains\nprefill-1 has left\n"
    )
    assert admin.asked == [pb.ScaleWorkersRequest(prefill=1, decode=2)]


def test_a_change_that_fails_is_said_and_the_command_fails():
    step = Response(worker="decode-1", phase=Response.PHASE_FAILED, reason="no room")
    result = scale(ScalingAdmin(step), "--decode", "2")
    assert result.exit_code == 1
    assert result.stdout == "decode-1 FAILED: no room\n"
    assert "1 of the changes could not be made" in result.stderr


def test_nothing_to_do_is_wrong_usage():
    result = scale(ScalingAdmin())
    assert result.exit_code == 2
    assert "give --prefill, --decode or --aggregated" in result.stderr
    assert scale(ScalingAdmin(), "--decode", "0").exit_code == 2
