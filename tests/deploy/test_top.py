"""`kvrelay top` in a terminal of 80 columns and 24 lines, in one that can do nothing, and piped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.deploy.commands.top_screen import Rates, View, lines, shares
from kvrelay.v1 import inference_pb2 as pb

from .conftest import Kvrelay
from .scripted_service import ScriptedService
from .terminal import COLUMNS, LINES, Terminal

FULL = pb.PoolState(
    pool="full",
    page_size=16,
    total=2000,
    free=600,
    held=800,
    cached_evictable=300,
    cached_protected=200,
    session=99,
    quarantined=1,
)
ROWS = pb.PoolState(pool="rows", total=64, free=62, held=2)


def status(worker: str, role: pb.WorkerRole, **load: Any) -> pb.WorkerStatus:
    load = {"pools": [FULL, ROWS], **load}
    return pb.WorkerStatus(worker=worker, role=role, ready=True, load=pb.WorkerLoad(**load))


class CountingService(ScriptedService):
    """Its clock and its sums go on by the same amount at each call, whenever that comes."""

    def GetServerInfo(self, request, context):  # noqa: N802 (gRPC's name)
        answer = super().GetServerInfo(request, context)
        self.uptime_seconds += 2
        if self.counts is not None:
            self.counts.ended["stop"] += 25
            self.counts.prompt_tokens += 3000
            self.counts.output_tokens += 1500
        return answer


@pytest.fixture
def service() -> ScriptedService:
    service = CountingService()
    service.counts = pb.RequestCounts(
        waiting=1, streaming=2, ended={"stop": 5, "UNAVAILABLE": 1}, resubmitted=4
    )
    service.workers = [
        status("decode-0", pb.WORKER_ROLE_DECODE, waiting_requests=1, running_requests=2),
        status("prefill-0", pb.WORKER_ROLE_PREFILL, running_requests=1, waiting_tokens=12345),
    ]
    return service


SCREEN = """\
tiny  kvrelay 0.1.0  up 0:00:14  SERVER
requests 3 live: 1 before the first token, 2 streaming
phases   prefill 0 queued, 1 computed   decode 1 arriving, 2 generating
rates    12.5 requests/s   1.5k prompt tokens/s   750 output tokens/s
ended    stop 30  unavailable 1   resubmitted 4
! decode-0: 7 pages in quarantine for 95 s: failed read

worker    state wait run tokens pool                                   used
decode-0  ready    1   2      0 full #############===s!-----..........  55% 2.0k
                                rows #................................   4% 64
prefill-0 ready    0   1    12k full #############===s!-----..........  55% 2.0k
                                rows #................................   4% 64
# held  = cached protected  s session  ! quarantined  - cached evictable  . free
"""


def test_once_prints_one_screen_with_rates(kvrelay: Kvrelay, service: ScriptedService, server: str):
    service.workers[0].load.quarantine.append(
        pb.QuarantineState(reason="failed_read", pages=7, seconds=95)
    )
    result = kvrelay("top", "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    assert result.stdout == SCREEN.replace("SERVER", server)


def test_a_token_without_the_right_admin_is_told_less(kvrelay: Kvrelay, service: ScriptedService):
    service.counts = None
    shown = kvrelay("top", "--once", "--interval", "0.1").stdout
    assert "\nrequests 3 live\n" in shown
    assert "\nrates    shown to a token with the right admin\n" in shown


def test_a_router_that_is_not_there_is_a_failure(kvrelay: Kvrelay):
    result = kvrelay("top", "--once", "--server", "127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: 127.0.0.1:9: UNAVAILABLE: ")


@contextmanager
def top(server: str, **environment: str) -> Iterator[Terminal]:
    arguments = ["top", "--server", server, "--interval", "0.1"]
    terminal = Terminal(arguments, **environment)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_terminal_shows_one_screen_that_changes(service: ScriptedService, server: str):
    with top(server, TERM="xterm-256color") as terminal:
        terminal.read_until(lambda: "12.5 requests/s" in "\n".join(terminal.shown))
        assert terminal.shown[0].startswith("tiny  kvrelay 0.1.0  up 0:00:")
        assert terminal.shown[9].startswith("prefill-0")
        assert terminal.shown[11].endswith(". free")
        assert not any(terminal.shown[12:])
        assert {"green", "red", "blue"} <= terminal.colours
        before = terminal.shown[0]
        terminal.read_until(lambda: terminal.shown[0] not in (before, ""))
        # A worker comes, and one is refused.
        refused = status("decode-1", pb.WORKER_ROLE_DECODE)
        refused.refusal = "another model \x1b[2J"
        service.workers.append(refused)
        terminal.read_until(lambda: "! REFUSED decode-1: another model ?[2J" in terminal.shown)
        assert terminal.interrupt() == 0
    # The screen that was there before, and the cursor.
    assert terminal.written.count(b"\x1b[?1049l") == 1
    assert terminal.written.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in terminal.written


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "dumb"},
        pytest.param({"TERM": "xterm", "NO_COLOR": "1"}, marks=pytest.mark.slow),
    ],
)
def test_without_colour_nothing_is_lost(server: str, environment: dict[str, str]):
    with top(server, **environment) as terminal:
        terminal.read_until(lambda: b"12.5 requests/s" in terminal.written)
        terminal.read_until(lambda: terminal.written.count(b". free") > 2)
        assert terminal.interrupt() == 0
    if environment["TERM"] == "dumb":
        assert b"\x1b" not in terminal.written
    codes = re.findall(rb"\x1b\[([\d;]*)m", terminal.written)
    parts = {part for code in codes for part in code.split(b";")}
    assert not [part for part in parts if len(part) > 1], parts
    assert b"###===s!---" in terminal.written


def test_a_router_that_goes_away_is_said_beside_the_last_report(
    service: ScriptedService, server: str
):
    view = View(server, REPORT).next(LATER)
    assert view.rates == Rates(5, 50, 10)
    gone = view.without_answer("127.0.0.1:1: UNAVAILABLE: connection refused")
    shown = [line.plain for line in lines(gone, COLUMNS, LINES)]
    assert "! 127.0.0.1:1: UNAVAILABLE: connection refused" in shown
    assert "rates    -" in shown
    assert "requests 3 live: 1 before the first token, 2 streaming" in shown
    back = gone.next({**LATER, "uptime_seconds": 0.5})  # another process
    assert (back.problem, back.rates) == ("", None)


def report(workers: int, **of_pool: int) -> dict[str, Any]:
    pool = {
        "pool": "draft_window",
        "page_size": 16,
        "free": 10**6,
        "held": 234567,
        "cached_evictable": 0,
        "cached_protected": 0,
        "session": 0,
        "quarantined": 0,
        "in_flight": 0,
        "sum": 1234567,
        "total": 1234567,
        "promised": 0,
        **of_pool,
    }
    worker = {
        "role": "aggregated",
        "ready": True,
        "draining": True,
        "refusal": "",
        "waiting_requests": 123456,
        "running_requests": 99999,
        "waiting_tokens": 123456789,
        "pools": [pool, {**pool, "pool": "rows", "held": 1, "sum": 1000001, "total": 1000001}],
        "quarantine": [],
        "peers": [],
    }
    counts = {
        "waiting": 1,
        "streaming": 2,
        "waiting_for_workers": 0,
        "ended": {"stop": 10},
        "resubmitted": 0,
        "prompt_tokens": 100,
        "output_tokens": 20,
    }
    return {
        "model": "a/model-with-a-long-name" * 4,
        "version": "0.1.0",
        "uptime_seconds": 10.0,
        "live_requests": 3,
        "requests": counts,
        "workers": [{**worker, "worker": f"aggregated-{number}"} for number in range(workers)],
    }


REPORT = report(1)
LATER = {
    **REPORT,
    "uptime_seconds": 12.0,
    "requests": {
        **REPORT["requests"],
        "ended": {"stop": 18, "length": 2},
        "prompt_tokens": 200,
        "output_tokens": 40,
    },
}


@pytest.mark.parametrize("workers", [0, 1, 8, 15, 16, 400])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_any_number_of_workers_fits(workers: int, width: int):
    screen = lines(View("127.0.0.1:50051", report(workers)), width, LINES)
    assert len(screen) <= LINES
    assert max(line.cell_len for line in screen) <= width
    shown = "\n".join(line.plain for line in screen)
    # All pools; then the fullest of each worker; then those that there is room for.
    assert ("rows" in shown) == (1 <= workers <= 8)
    assert ("more lines" in shown) == (workers > 16)
    assert len(lines(View("", report(workers)), width, None)) == 8 + 2 * workers


def test_a_pool_that_does_not_balance_stands_out():
    shown = [line.plain for line in lines(View("", report(1, held=5, sum=1000005)), COLUMNS, LINES)]
    assert "! aggregated-0: draft_window has 1000005 of 1234567 pages (a bug)" in shown


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(6, 200))
def test_shares_fill_the_bar_and_show_what_is_not_zero(counts: list[int], width: int):
    cells = shares(counts, width)
    if not any(counts):
        assert not any(cells)
        return
    assert sum(cells) == width
    assert [cell > 0 for cell in cells] == [count > 0 for count in counts]
    # Nearly as large as the count; where others must have one, at most those fewer.
    for cell, count in zip(cells, counts, strict=True):
        assert abs(cell - count * width / sum(counts)) < len(counts)
