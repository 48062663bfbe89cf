"""What `kvrelay up` and the commands for a controller are told; tests/cluster has real ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.deploy.cli import main
from kvrelay.deploy.commands.controller_status import as_text
from kvrelay.deploy.commands.up import _up
from kvrelay.deploy.controller.controller_spec import SPEC, ControllerSpec
from kvrelay.deploy.controller.detached import bring_up
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.errors import ClusterError, OptionError
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.deploy.nodes.worker_end import reason_in
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.up_options import UpOptions
from kvrelay.deploy.reach.find_controller import Controller
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals
from kvrelay.wire.cluster_state import ClusterState, WorkerPhase, WorkerState
from kvrelay.wire.messages import CLUSTER_STATE
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_placement import CONFIG


def refusal(**options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        UpOptions(**options)
    return str(caught.value)


def test_a_cluster_that_outlives_the_command_needs_a_ray_that_does():
    assert refusal().startswith("--ray-address: must be given")


def test_a_controller_that_others_can_reach_asks_for_tokens(tmp_path: Path):
    tls: dict[str, Any] = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_ca")}
    said = refusal(ray_address="auto", **tls)
    assert said.startswith("--auth-token-file: the controller listens")
    UpOptions(ray_address="auto", auth_token_file=tmp_path, **tls)
    UpOptions(ray_address="auto", insecure=True)
    UpOptions(ray_address="auto", advertise="127.0.0.1")


def test_a_controller_has_no_options_of_a_router():
    result = CliRunner().invoke(main, ["up", "--help"])
    assert result.exit_code == 0
    offered = {word for line in result.output.splitlines() for word in line.split()[:1]}
    assert {"--controller-port", "--placement", "--auth-token-file", "--prefill-on"} <= offered
    assert not offered & {"--grpc", "--http", "--admin", "--max-attempts"}


def test_serve_detached_is_up(monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[UpOptions, bool]] = []
    monkeypatch.setattr(
        "kvrelay.deploy.commands.up.run", lambda options, _, *, debug: told.append((options, debug))
    )
    workers = ["--ray-address", "auto", "--insecure", "--prefill", "2", "--debug"]
    for command in (["up"], ["serve", "--detach"]):
        result = CliRunner().invoke(main, [*command, *workers])
        assert (result.exit_code, result.output) == (0, "")
    expected = UpOptions(ray_address="auto", insecure=True, prefill=2)
    assert told == [(expected, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--ray-address: must be given: such a cluster outlives the command, in a Ray"),
        (["--ray-address", "auto", "--insecure", "--grpc", "127.0.0.1:0"], "--grpc: is for a rou"),
        (["--ray-address", "auto", "--insecure", "--max-attempts", "2"], "--max-attempts: is for"),
    ],
)
def test_serve_detached_has_no_options_of_a_router(arguments: list[str], said: str):
    result = CliRunner().invoke(main, ["serve", "--detach", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["drain", "roll", "scale", "status", "router"])
def test_a_controller_is_named_in_one_way(command: str):
    arguments = [command, "--controller", "127.0.0.1:1", "--ray-address", "auto"]
    if command == "drain":
        arguments.append("decode-0")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "give --controller or --ray-address" in result.output


def test_the_old_name_of_the_option_still_works(monkeypatch: pytest.MonkeyPatch):
    told: list[Controller] = []
    monkeypatch.setattr(
        "kvrelay.deploy.commands.router.run", lambda options, where, *_: told.append(where)
    )
    for flag in ("--controller", "--admin"):
        CliRunner().invoke(main, ["router", flag, "127.0.0.1:7"])
    CliRunner().invoke(main, ["router"])
    assert told == [Controller(Address("127.0.0.1", port)) for port in (7, 7, 50052)]


def test_a_spec_is_read_as_it_was_written_and_another_versions_is_refused():
    spec = ControllerSpec("c", (CONFIG,), PlacementPlan(namespace="kvrelay/c"), 30, port=5)
    assert ControllerSpec.from_bytes(spec.to_bytes()) == spec
    with pytest.raises(ClusterError, match="another version of kvrelay"):
        ControllerSpec.from_bytes(b'{"version": 0}\n')
    other = spec.to_bytes().replace(VERSION.encode(), b"0.0.9 (00c0ffee)")
    with pytest.raises(ClusterError, match=r"kvrelay 0\.0\.9 \(00c0ffee\) has .*kvrelay down"):
        ControllerSpec.from_bytes(other)


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_cluster_that_could_not_start_does_not_keep_its_name(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
):
    ended: list[str] = []

    async def start(*_: object, **options: object) -> bool:
        return is_new

    async def fail(*_: object) -> None:
        raise ClusterError("no room")

    async def end(store: object, namespace: str) -> None:
        ended.append(namespace)

    monkeypatch.setattr(
        "kvrelay.deploy.controller.records.ray_store.RayStore.of_this_process",
        lambda namespace: None,
    )
    for name, fake in (("start_controller", start), ("until_leading", fail), ("end_cluster", end)):
        monkeypatch.setattr(f"kvrelay.deploy.controller.detached.{name}", fake)
    spec = ControllerSpec("c", (CONFIG,), PlacementPlan(namespace="kvrelay/c"), 30)
    with StopSignals() as signals, pytest.raises(ClusterError, match="no room"):
        await _up(spec, (), "kvrelay/c", StartProgress(StringIO()), signals)
    assert ended == ["kvrelay/c"]


SPEC_OF_C = ControllerSpec("c", (CONFIG,), PlacementPlan(namespace="kvrelay/c"), 30)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets functions of `detached` that would call Ray: by default it does all at once."""

    async def end(store: InProcessStore, namespace: str) -> None:
        for key in await store.keys(""):
            await asyncio.sleep(0)
            await store.delete(key)

    def script(**fakes: object) -> None:
        nothing = dict.fromkeys(("_has_workers", "offer_for_good", "_place_controller"), no)
        for name, fake in {**nothing, "end_cluster": end, **fakes}.items():
            monkeypatch.setattr(f"kvrelay.deploy.controller.detached.{name}", fake)

    return script


def no(*_: object) -> bool:
    return False


def away(*_: object) -> bool:
    raise ray.exceptions.RaySystemError("the head is away")


async def test_why_a_cluster_did_not_start_is_said_though_ctrl_c_comes_while_it_is_ended(
    scripted: Callable[..., None],
):
    failed = asyncio.Event()

    async def fail(*_: object) -> None:
        failed.set()
        raise ClusterError("no room")

    scripted(until_leading=fail)
    store = InProcessStore()
    begun = asyncio.create_task(bring_up(store, "kvrelay/c", SPEC_OF_C))
    await failed.wait()
    begun.cancel()
    with pytest.raises(ClusterError, match="no room"):
        await begun
    assert not await store.keys("")


@pytest.mark.parametrize(
    ("fails", "is_new"),
    [
        ("_has_workers", True),
        *itertools.product(["offer_for_good", "_place_controller", "until_leading"], [True, False]),
    ],
)
async def test_a_start_that_ray_cuts_off_leaves_what_was_there_before(
    fails: str, is_new: bool, scripted: Callable[..., None]
):
    """A cluster that ran already runs on; of a new one nothing is left."""

    async def leading(*_: object) -> None:
        away()

    store = InProcessStore()
    if not is_new:
        await store.put(SPEC, SPEC_OF_C.to_bytes())
    scripted(**{fails: leading if fails == "until_leading" else away})
    with pytest.raises(ray.exceptions.RaySystemError, match="the head is away"):
        await bring_up(store, "kvrelay/c", SPEC_OF_C, checkpoints=((Path("model"), {}),))
    assert await store.keys("") == ([] if is_new else [SPEC])


STATE = ClusterState(
    name="default",
    epoch=3,
    leads=False,
    changing=True,
    pid=7,
    uptime_seconds=12.3,
    workers=(
        WorkerState("decode-0", WorkerRole.DECODE, WorkerPhase.STARTING),
        WorkerState(
            *("prefill-0", WorkerRole.PREFILL, WorkerPhase.DRAINING, "prefill-0-ab"),
            *("10.0.0.2:5", "10.0.0.2", 9, True),
            last_end="its process died",
        ),
    ),
)


def test_the_state_of_a_cluster_crosses_the_wire_and_is_shown():
    assert CLUSTER_STATE.from_message(CLUSTER_STATE.to_message(STATE)) == STATE
    assert as_text(STATE).splitlines() == [
        "cluster default: epoch 3, controller 7, up 12 s, DOES NOT LEAD NOW, the number of workers "
        "is being changed",
        "  decode-0     starting",
        "  prefill-0    draining, to be removed prefill-0-ab  10.0.0.2:5  process 9 on 10.0.0.2",
        "               its last process died: its process died",
    ]


RAYS_DETAIL = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 10.0.0.2, ID: cf9ecb) was 60.30GB used / 62.00GB limit (0.972581)
OOM kill reason: Memory usage 64746624614B exceeded threshold of 63243000000B (95.0% of 66571MB)
Object store memory usage: [- objects spillable: 0
"""


def test_the_reason_for_which_rays_memory_monitor_ends_a_worker():
    reason = reason_in(RAYS_DETAIL)
    assert "\n" not in reason
    for part in ("memory monitor", "60.30GB used / 62.00GB", "exceeded threshold", "--kv-memory"):
        assert part in reason
    assert "spillable" not in reason
