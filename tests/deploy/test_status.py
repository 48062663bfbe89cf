from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrelay.deploy.cli import main
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from tests.checkpoints import make_tokenizer
from tests.worker_infos import worker_info

from .conftest import Kvrelay
from .scripted_service import ScriptedService

POOL = pb.PoolState(pool="full", page_size=16, total=100, free=60, held=40, promised=8)
ROWS = pb.PoolState(pool="rows", total=64, free=62, held=1, quarantined=1)


@pytest.fixture(autouse=True)
def workers(service: ScriptedService) -> None:
    service.workers = [
        pb.WorkerStatus(
            worker="decode-0",
            role=pb.WORKER_ROLE_DECODE,
            incarnation="decode-0-abc",
            address="127.0.0.1:1",
            metrics_address="127.0.0.1:2",
            ready=True,
            model_digest="0123456789ab",
            load=pb.WorkerLoad(
                waiting_requests=1,
                running_requests=2,
                waiting_tokens=300,
                pools=[POOL, ROWS],
                growth_tokens=120,
                speeds=pb.StepSpeeds(
                    seconds_per_step=0.0105,
                    seconds_per_row=0.001,
                    seconds_per_token=0.0005,
                    chunk_tokens=512,
                    rows_known=True,
                ),
            ),
        ),
        pb.WorkerStatus(
            worker="prefill-0", role=pb.WORKER_ROLE_PREFILL, incarnation="prefill-0-def"
        ),
    ]


def test_tables_show_workers_and_pools_with_their_sums(kvrelay: Kvrelay):
    result = kvrelay("status")
    assert result.exit_code == 0
    assert (
        result.stdout
        == """\
tiny (digest 0123456789ab), kvrelay 0.1.0, up 12 s, 3 live requests

worker     role     incarnation    digest        ready  address      metrics      waiting  running  tokens due  growth  1k prompt  step
decode-0   decode   decode-0-abc   0123456789ab  yes    127.0.0.1:1  127.0.0.1:2        1        2         300     120  -          12.5 ms
prefill-0  prefill  prefill-0-def  -             no                                     0        0           0       0  -          -

worker    pool  page size  free  held  cached evictable  cached protected  session  quarantined  in flight  sum  total  promised
decode-0  full         16    60    40                 0                 0        0            0          0  100    100         8
decode-0  rows          -    62     1                 0                 0        0            1          0   64     64         0
"""  # noqa: E501
    )


def test_a_worker_that_computes_prompts_tells_how_fast(kvrelay: Kvrelay, service: ScriptedService):
    service.workers[0].load.speeds.prompts_known = True
    assert "  120  0.533 s    12.5 ms\n" in kvrelay("status").stdout


def test_an_aggregated_worker_is_called_so(kvrelay: Kvrelay, service: ScriptedService):
    service.workers = [pb.WorkerStatus(worker="aggregated-0", role=pb.WORKER_ROLE_AGGREGATED)]
    assert "\naggregated-0  aggregated " in kvrelay("status").stdout
    assert json.loads(kvrelay("status", "--json").stdout)["workers"][0]["role"] == "aggregated"


def test_a_pool_that_does_not_balance_is_marked(kvrelay: Kvrelay, service: ScriptedService):
    service.workers[0].load.pools[0].held = 39
    assert " 99 (!)    100 " in kvrelay("status").stdout


def test_a_worker_with_another_model_is_shown_as_refused(
    kvrelay: Kvrelay, service: ScriptedService
):
    why = "prefill-0-def has loaded model 7e7e, not 0123456789ab, which is served"
    service.workers[1].MergeFrom(
        pb.WorkerStatus(ready=True, model_digest="7e7e7e7e7e7e", refusal=why)
    )
    shown = kvrelay("status").stdout
    assert "\nprefill-0  prefill  prefill-0-def  7e7e7e7e7e7e  REFUSED " in shown
    assert f"\n\nREFUSED prefill-0: {why}\n\n" in shown
    report = json.loads(kvrelay("status", "--json").stdout)
    assert report["model_digest"] == "0123456789ab"
    shown = report["workers"][1]
    assert (shown["model_digest"], shown["refusal"]) == ("7e7e7e7e7e7e", why)


def test_what_a_worker_reads_from_and_how_fast(kvrelay: Kvrelay, service: ScriptedService):
    service.workers[0].load.peers.extend(
        [
            pb.PeerTransfer(
                incarnation="prefill-0-def",
                backend="UCX",
                transports="all",
                read_bytes_per_second=5.25e9,
                write_bytes_per_second=4e9,
                host_bytes_per_second=3e9,
            ),
            pb.PeerTransfer(
                incarnation="prefill-2-fed",
                backend="UCX",
                transports="cuda_ipc",
                read_bytes_per_second=3e11,
                host_refusal="no transport",
            ),
            pb.PeerTransfer(incarnation="prefill-1-abc", transports="tcp", refusal="too slow"),
        ]
    )
    assert kvrelay("status").stdout.endswith(
        """
worker    reads from     GB/s  host  back  backend  transports
decode-0  prefill-0-def  5.25  3     4     UCX      all
decode-0  prefill-2-fed  300   0     0     UCX      cuda_ipc    HOST NOT READ: no transport
decode-0  prefill-1-abc  0     0     0              tcp         REFUSED: too slow
"""
    )
    decode, prefill = json.loads(kvrelay("status", "--json").stdout)["workers"]
    assert decode["peers"][0] == {
        "incarnation": "prefill-0-def",
        "backend": "UCX",
        "transports": "all",
        "read_bytes_per_second": 5.25e9,
        "write_bytes_per_second": 4e9,
        "lent_tokens_per_second": 0.0,
        "refusal": "",
        "host_bytes_per_second": 3e9,
        "host_refusal": "",
    }
    assert prefill["peers"] == []


def test_storage_that_is_not_written_is_told(kvrelay: Kvrelay, service: ScriptedService):
    assert "STORAGE" not in kvrelay("status").stdout
    service.workers[0].load.storage_error = "the disk is full"
    assert "\n\nSTORAGE of decode-0 is not written: the disk is full\n" in kvrelay("status").stdout
    decode, prefill = json.loads(kvrelay("status", "--json").stdout)["workers"]
    assert (decode["storage_error"], prefill["storage_error"]) == ("the disk is full", "")


def test_json_says_the_same(kvrelay: Kvrelay):
    report = json.loads(kvrelay("status", "--json").stdout)
    assert report["model"] == "tiny"
    assert report["live_requests"] == 3
    decode, prefill = report["workers"]
    assert (decode["role"], decode["ready"], decode["waiting_tokens"]) == ("decode", True, 300)
    assert (decode["growth_tokens"], decode["speeds"]["seconds_per_row"]) == (120, 0.001)
    assert (prefill["role"], prefill["ready"], prefill["pools"]) == ("prefill", False, [])
    assert decode["pools"][0] == {
        "pool": "full",
        "page_size": 16,
        "free": 60,
        "held": 40,
        "cached_evictable": 0,
        "cached_protected": 0,
        "session": 0,
        "quarantined": 0,
        "in_flight": 0,
        "sum": 100,
        "total": 100,
        "promised": 8,
    }


async def test_a_router_whose_decode_workers_are_gone_still_tells(tmp_path: Path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    anywhere = "127.0.0.1:0"
    config = RouterConfig("tiny", tmp_path, "float32", anywhere, anywhere)
    prefill = worker_info("prefill-0", incarnation="prefill-0-def")
    router = Router(config, StaticDiscovery([prefill]))
    await router.start()
    try:
        shown = await asyncio.to_thread(status_of, router.grpc_address)
        told = await asyncio.to_thread(status_of, router.grpc_address, "--json")
    finally:
        await router.stop()
    assert shown.exit_code == told.exit_code == 0, shown.stderr + told.stderr
    assert shown.stdout.startswith("NO MODEL (a role has no worker), kvrelay ")
    assert "prefill-0-def" in shown.stdout
    report = json.loads(told.stdout)
    assert report["model"] is None
    assert [worker["metrics_address"] for worker in report["workers"]] == ["127.0.0.1:2"]


def status_of(server: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", "--server", server, *arguments])


def test_a_server_that_is_not_there_is_a_failure():
    result = status_of("127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: 127.0.0.1:9: UNAVAILABLE: ")


def test_tables_show_what_quarantine_waits_for(kvrelay: Kvrelay, service: ScriptedService):
    service.workers[0].load.quarantine.extend(
        [pb.QuarantineState(reason="failed_read", pages=12, seconds=95)]
    )
    result = kvrelay("status")
    assert (
        """
worker    quarantine waits for  pages  oldest
decode-0  failed read              12  95 s
"""
        in result.stdout
    )
    result = kvrelay("status", "--json")
    decode, prefill = json.loads(result.stdout)["workers"]
    assert decode["quarantine"] == [{"reason": "failed_read", "pages": 12, "seconds": 95}]
    assert prefill["quarantine"] == []
