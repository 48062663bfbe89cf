from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.commands.option_table import markdown
from kvrelay.deploy.commands.serve_text import headline
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.records.ordered_changes import Revision
from kvrelay.deploy.deployment import worker_configs
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.router_config import router_config
from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.worker.worker_lease import Renewal, WorkerLease
from kvrelay.net.tls import TlsFiles
from kvrelay.options.memory_share import MemoryShare
from kvrelay.router.config import PlacementMode
from kvrelay.wire.worker_info import WorkerRole

ANY_PORT = Address("127.0.0.1", 0)
BAD = [
    ("prefill", 0),
    ("decode", -1),
    ("aggregated", -1),
    ("page_size", 0),
    ("kv_memory", 0),
    ("max_running", 0),
    ("chunk_tokens", 0),
    ("max_model_len", 0),
    ("threads", 0),
    ("default_max_tokens", 0),
    ("max_live_requests", 0),
    ("page_order", "sideways"),
    ("dtype", "int4"),
    ("growth_min", -0.1),
    ("growth_min", float("nan")),
    ("growth_max", 1.1),
    ("cuda_graph_sizes", "many"),
    ("cuda_graph_sizes", "1,,2"),
    ("cuda_graph_sizes", "4,0"),
    ("bypass_limit", -1),
    ("debug_retract_every", -1),
    ("num_draft_tokens", 0),
    ("speculation", "luck"),
    ("draft_model", "some/draft"),  # nobody would use it
    ("verify_pages", "some"),
    ("min_transfer_gigabytes_per_second", -1.0),
    ("min_transfer_gigabytes_per_second", float("nan")),
    ("min_transfer_gigabytes_per_second", float("inf")),
    ("device", "tpu"),
    ("model", ""),
    ("model_name", "  "),
    ("model_name", "a,,b"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_names_its_option(field: str, value: Any):
    option = "--" + field.replace("_", "-")
    with pytest.raises(OptionError, match=f"^{option}: must") as caught:
        ServeOptions(**{field: value})
    assert caught.value.option == option


@pytest.mark.parametrize("field", ["prefill", "decode"])
def test_aggregated_workers_are_in_place_of_the_others(field: str):
    one: dict[str, Any] = {field: 1}
    none: dict[str, Any] = {field: 0}
    with pytest.raises(OptionError, match=f"^--aggregated: .* leave --{field} out"):
        ServeOptions(aggregated=1, **one)
    assert ServeOptions(aggregated=1, **none).roles == {"aggregated": 1}


def test_workers_are_named_by_role_and_number():
    def names(**counts: Any) -> list[tuple[str, str]]:
        configs = worker_configs(ServeOptions(**counts), ModelFolder("none", Path()))
        return [(config.name, config.role.value) for config in configs]

    assert names() == [("prefill-0", "prefill"), ("decode-0", "decode")]
    assert names(decode=2) == [*names(), ("decode-1", "decode")]
    assert names(aggregated=2) == [("aggregated-0", "aggregated"), ("aggregated-1", "aggregated")]


@pytest.mark.parametrize("placement", ["adaptive", "disaggregated"])
def test_decode_workers_are_told_whether_prompts_may_come(placement: str):
    options = ServeOptions(placement=PlacementMode(placement))
    [_, decode] = worker_configs(options, ModelFolder("none", Path()))
    assert decode.role is WorkerRole.DECODE
    assert decode.computes_prompts is (placement == "adaptive")


def test_a_lease_outlasts_a_slow_answer():
    with pytest.raises(OptionError, match=r"^--worker-lease: must be at least three .*, 15: "):
        ServeOptions(worker_lease=44)
    options = ServeOptions(worker_timeout=9, worker_lease=29)
    model = ModelFolder("none", Path("none"))
    assert {one.lease_seconds for one in worker_configs(options, model)} == {29}
    assert {one.lease_seconds for one in worker_configs(ServeOptions(), model)} == {60}
    slow = ServeOptions(worker_timeout=40)
    assert {one.lease_seconds for one in worker_configs(slow, model)} == {160}


@pytest.mark.parametrize("answer_seconds", [0.1, 9.0, 14.9])
def test_a_worker_that_answers_just_in_time_keeps_the_shortest_lease(answer_seconds: float):
    options = ServeOptions(worker_timeout=15, worker_lease=45)
    now, stamp, seconds = 0.0, None, options.worker_lease
    assert seconds is not None
    lease = WorkerLease(lambda: now)
    lease.begin(seconds, lambda: None)
    for _ in range(20):
        renewal = Renewal(1, seconds, stamp)
        now += answer_seconds
        assert not lease.has_run_out
        lease.renew(renewal)
        stamp = lease.stamp()
        now += options.worker_timeout / 3


def test_bounds_of_growth_are_in_order():
    with pytest.raises(OptionError, match=r"^--growth-min: must not be above --growth-max, 0\.5"):
        ServeOptions(growth_min=0.6, growth_max=0.5)


def test_drafting_needs_a_model():
    with pytest.raises(OptionError, match=r"^--draft-model: must be given with"):
        ServeOptions(speculation=Speculation.DRAFT)


def test_workers_are_told_what_the_engine_is_to_do():
    told: dict[str, Any] = {
        "overlap": False,
        "growth_min": 0.25,
        "growth_max": 0.5,
        "bypass_limit": 0,
        "speculation": "draft",
        "num_draft_tokens": 3,
        "debug_retract_every": 11,
    }
    options = ServeOptions(**told, draft_model="some/draft")
    for config in worker_configs(options, ModelFolder("none", Path(), Path("draft"))):
        assert {name: getattr(config, name) for name in told} == told
        assert config.draft_model_path == Path("draft")


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ("drop:everything", "'drop:everything': everything is none of ask, grant"),
        ("decode-1/kill:queued", "there is no worker decode-1"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: str, why: str):
    with pytest.raises(OptionError, match=f"^--debug-faults: {why}"):
        ServeOptions(debug_faults=faults)


def test_workers_are_told_of_the_faults_that_are_for_them():
    def faults(specs: str) -> list[int | None]:
        configs = worker_configs(ServeOptions(debug_faults=specs), ModelFolder("none", Path()))
        return [None if config.faults is None else len(config.faults) for config in configs]

    assert faults("") == [None, None]
    assert faults("drop:done, prefill-0/kill:announced:2") == [2, 1]


def test_a_silent_peer_is_given_up_as_a_silent_worker_is():
    options = ServeOptions(worker_timeout=3.5)
    assert {
        config.worker_timeout for config in worker_configs(options, ModelFolder("none", Path()))
    } == {3.5}


def test_workers_defaults_are_the_engines():
    default = WorkerConfig("decode-0", WorkerRole.DECODE, Path(), "none")
    [_, config] = worker_configs(ServeOptions(metrics=ANY_PORT), ModelFolder("none", Path()))
    assert config.left_to_device == {"kv_memory", "max_running", "chunk_tokens"}
    assert replace(config, threads=1, left_to_device=frozenset()) == default


def test_what_a_user_gives_is_not_left_to_the_device():
    options = ServeOptions(metrics=ANY_PORT, kv_memory=2 << 30, max_running=64)
    [_, config] = worker_configs(options, ModelFolder("none", Path()))
    assert config.left_to_device == {"chunk_tokens"}
    assert (config.kv_memory, config.max_running) == (2 << 30, 64)
    rolled = WorkerConfigs([config]).of("", config.role, Revision(2, {"chunk_tokens": "7"}))
    assert rolled.left_to_device == set()
    assert rolled.chunk_tokens == 7
    again = config.with_options({"kv_memory": None, "max_running": 5})
    assert again.left_to_device == {"kv_memory", "chunk_tokens"}
    assert (again.kv_memory, again.max_running) == (512 << 20, 5)


def test_the_first_line_tells_the_memory_that_was_given():
    assert headline(ServeOptions()).endswith(", bfloat16")
    assert headline(ServeOptions(kv_memory=1 << 30)).endswith(", 1GiB of KV each")
    assert headline(ServeOptions(kv_memory=MemoryShare(0.5))).endswith(", what is left of KV each")


@pytest.mark.parametrize("option", ["grpc", "metrics"])
def test_an_open_door_beyond_the_machine_needs_insecure(option: str):
    reachable: dict[str, Any] = {option: Address("0.0.0.0", 1234)}
    with pytest.raises(OptionError, match=f"^--{option}: .*--insecure"):
        ServeOptions(**reachable)
    ServeOptions(**reachable, insecure=True)


PAIR: dict[str, Any] = {"tls_cert": Path("crt"), "tls_key": Path("key"), "tls_ca": Path("ca")}
FRONT_PAIR: dict[str, Any] = {
    "front_tls_cert": Path("front.crt"),
    "front_tls_key": Path("front.key"),
}
TOKENS: dict[str, Any] = {"auth_token_file": Path("tokens")}


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, "--tls-cert or --front-tls-cert and --auth-token-file, listen on"),
        (PAIR, "give --auth-token-file, listen on"),
        (FRONT_PAIR, "give --auth-token-file, listen on"),
        (TOKENS, "give --tls-cert or --front-tls-cert, listen on"),
    ],
)
def test_beyond_the_machine_takes_both_tls_and_tokens(given: dict[str, Any], lacking: str):
    reachable = Address("0.0.0.0", 1234)
    for listener in ("grpc", "admin"):
        with pytest.raises(OptionError, match=f"^--{listener}: .*{lacking}"):
            ServeOptions(**{**given, listener: reachable})
        ServeOptions(**{**given, listener: reachable}, insecure=True)
    ServeOptions(**given)


@pytest.mark.parametrize("pair", [PAIR, FRONT_PAIR])
def test_with_tls_and_tokens_every_machine_may_connect(pair: dict[str, Any]):
    ServeOptions(grpc=Address("0.0.0.0", 1234), admin=Address("0.0.0.0", 1235), **pair, **TOKENS)


@pytest.mark.parametrize("files", [PAIR, FRONT_PAIR])
def test_a_certificate_its_key_and_authority_come_together(files: dict[str, Any]):
    for missing in files:
        incomplete = {field: path for field, path in files.items() if field != missing}
        option = "--" + missing.replace("_", "-")
        with pytest.raises(OptionError, match=f"^{option}: must be given with --"):
            ServeOptions(**incomplete)


def test_the_front_shows_its_own_certificate_or_the_clusters():
    here = Path.cwd()  # workers are elsewhere
    files = TlsFiles(here / "crt", here / "key", here / "ca")
    front = TlsFiles(Path("front.crt"), Path("front.key"))
    cases: list[tuple[dict[str, Any], TlsFiles | None, TlsFiles | None]] = [
        ({}, None, None),
        (PAIR, files, TlsFiles(Path("crt"), Path("key"))),
        (FRONT_PAIR, None, front),
        ({**PAIR, **FRONT_PAIR}, files, front),
    ]
    for given, cluster_tls, front_tls in cases:
        options = ServeOptions(**given)
        assert (options.cluster_tls, options.front_tls) == (cluster_tls, front_tls)
        model = ModelFolder("none", Path())
        assert {config.tls for config in worker_configs(options, model)} == {cluster_tls}
        config = router_config(options, model)
        assert (config.worker_tls, config.front_tls) == (cluster_tls, front_tls)


def test_a_models_own_template_gives_way_to_the_option():
    model = ModelFolder("none", Path(), chat_template=Path("tools.jinja"))
    assert router_config(ServeOptions(), model).chat_template == Path("tools.jinja")
    assert router_config(ServeOptions(model_name="a, b"), model).model_aliases == ("b",)
    asked = ServeOptions(chat_template=Path("chat.jinja"))
    assert router_config(asked, model).chat_template == Path("chat.jinja")


def test_operators_are_shown_a_certificate_that_names_the_address():
    named, front = (
        TlsFiles(Path("crt"), Path("key")),
        TlsFiles(Path("front.crt"), Path("front.key")),
    )
    here, everywhere = Address("127.0.0.1", 1234), Address("0.0.0.0", 1234)
    cases: list[tuple[dict[str, Any], TlsFiles | None, TlsFiles | None]] = [
        (FRONT_PAIR, None, front),
        (PAIR, named, named),
        ({**PAIR, **FRONT_PAIR}, named, front),
    ]
    for given, on_loopback, elsewhere in cases:
        assert ServeOptions(admin=here, **given, **TOKENS).admin_tls == on_loopback
        assert ServeOptions(admin=everywhere, **given, **TOKENS).admin_tls == elsewhere


def test_workers_metrics_have_fixed_ports_after_the_routers():
    options = ServeOptions(prefill=1, decode=2, metrics=Address("127.0.0.1", 9400))
    assert [str(address) for address in options.worker_metrics()] == [
        "127.0.0.1:9401",
        "127.0.0.1:9402",
        "127.0.0.1:9403",
    ]
    configs = worker_configs(options, ModelFolder("none", Path()))
    assert [(config.name, config.metrics_port) for config in configs] == [
        ("prefill-0", 9401),
        ("decode-0", 9402),
        ("decode-1", 9403),
    ]


def test_any_port_for_the_router_is_any_for_the_workers():
    options = ServeOptions(metrics=ANY_PORT)
    assert options.worker_metrics() == ()
    assert {one.metrics_port for one in worker_configs(options, ModelFolder("none", Path()))} == {0}


@pytest.mark.parametrize(("metrics", "other"), [(65534, 1), (9400, 9402), (9400, 9400)])
@pytest.mark.parametrize("listener", ["grpc", "admin"])
def test_metrics_ports_that_cannot_be_are_refused(metrics: int, other: int, listener: str):
    given: dict[str, Any] = {listener: Address("127.0.0.1", other)}
    with pytest.raises(OptionError, match=r"^--metrics: "):
        ServeOptions(metrics=Address("127.0.0.1", metrics), **given)


def test_operators_and_clients_have_different_ports():
    with pytest.raises(OptionError, match=r"^--admin: --grpc takes the port 1234"):
        ServeOptions(grpc=Address("127.0.0.1", 1234), admin=Address("127.0.0.1", 1234))
    ServeOptions(grpc=ANY_PORT, admin=ANY_PORT)


def test_the_cores_are_shared_out_but_every_worker_has_a_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert ServeOptions().threads_per_worker() == 4
    assert ServeOptions(prefill=2).threads_per_worker() == 2
    assert ServeOptions(prefill=8, decode=8).threads_per_worker() == 1
    assert ServeOptions(aggregated=1).threads_per_worker() == 8
    assert ServeOptions(prefill=8, threads=3).threads_per_worker() == 3


def test_the_docs_table_has_a_row_for_every_option():
    rows = [line for line in markdown().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(dataclasses.fields(ServeOptions))
    assert "| `--kv-memory` | size, share, `auto` | 512MiB; auto on a GPU |" in "\n".join(rows)
    assert "| `--host-kv-memory` | size | `0` |" in "\n".join(rows)
    assert "| `--threads` | integer, at least 1 | an equal share of the cores |" in "\n".join(rows)
