"""A cluster under attack: nobody else notices, nothing dies, and no process grows."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.attack.bounds import BOUNDS
from tests.attack.cases import CASES
from tests.attack.watched import attackers, watcher
from tests.certificates import Authority
from tests.chaos.cluster import ChaosCluster, chaos_cluster
from tests.chaos.load import Load, check, make_cases

pytestmark = pytest.mark.alone  # it measures memory, and how fast others are served
MIB = 1 << 20
WORKER_TIMEOUT_S = 15.0
SLACK_MIB = 200.0
"""Four prompts of up to 40 MiB are on their way at any time, each in more than one copy."""
MOST_MIB = 300.0
"""That a process may have above what it had before."""
HTTP_KINDS = {
    "http crowd",
    "http leaver",
    "http malformed",
    "http slow",
    "http slow reader",
}
Peaks = dict[str, float]
"""MiB of each process."""


def targets(chaos: ChaosCluster) -> list[str]:
    told = ["--router", chaos.router.address, "--metrics", chaos.router.metrics_address]
    told += ["--http", chaos.router.http_address]
    for worker in chaos.cluster.workers.values():
        told += ["--worker", worker.address, "--metrics", worker.metrics_address]
    return told


@asynccontextmanager
async def attacked(arguments: Sequence[str], counts: dict[str, int]) -> AsyncIterator[None]:
    """The attack goes on as long as this context; then `counts` has what it has done."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attack.grpc_attack", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield
        assert process.returncode is None, "the attack has ended by itself"
        said, _ = await asyncio.wait_for(process.communicate(b""), 60)
        counts |= json.loads(said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask_over_http(url: str, answers: list[str]) -> None:
    """One client asks the same again and again, on a new connection each time."""
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    while True:
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{url}/v1/completions", json=body)
            answers.append(answer.raise_for_status().json()["choices"][0]["text"])
        await asyncio.sleep(0.1)


def memory(chaos: ChaosCluster) -> Peaks:
    """MiB of each process of the cluster."""
    pids = {name: worker.pid for name, worker in chaos.cluster.workers.items()}
    pids["router"] = chaos.router.pid
    return {name: psutil.Process(pid).memory_info().rss / MIB for name, pid in pids.items()}


async def attack(chaos: ChaosCluster, seconds: float, connections: int) -> None:
    """Attack for so long, and check what others saw of it.

    The memory of every process is flat if in the second half of the attack it is not above what
    it was in the first, but for `SLACK_MIB`.
    """
    expected = await chaos.learn(make_cases())
    load = Load(chaos.router.current, list(expected), chaos.bound, clients=3)
    await load.warm(6)
    workers, router = dict(chaos.cluster.workers), chaos.router.pid
    halves: tuple[Peaks, Peaks] = {}, {}
    idle = memory(chaos)
    counts: dict[str, int] = {}
    answers: list[str] = []
    asking = asyncio.create_task(ask_over_http(f"http://{chaos.router.http_address}", answers))
    async with attacked([*targets(chaos), "--connections", str(connections)], counts):
        begun, before = time.monotonic(), len(load.outcomes)
        while (passed := time.monotonic() - begun) < seconds:
            for name, mib in memory(chaos).items():
                half = halves[passed > seconds / 2]
                half[name] = max(half.get(name, 0.0), mib)
            await asyncio.sleep(1)
        served = len(load.outcomes) - before
        assert not asking.done(), asking.exception()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    outcomes = await load.stop()
    assert not check(outcomes, expected, may_be_lost=False)
    assert served > seconds / 4, "others were hardly served"
    assert len(answers) > seconds / 4, "others were hardly served over HTTP"
    assert len(set(answers)) == 1, answers
    assert dict(chaos.cluster.workers) == workers, "a worker was replaced"
    assert (chaos.router.pid, chaos.router.alive) == (router, True)
    grown = {name: halves[1][name] - halves[0][name] for name in halves[0]}
    assert all(mib < SLACK_MIB for mib in grown.values()), (grown, halves)
    highest = {name: halves[1][name] - mib for name, mib in idle.items()}
    assert all(mib < MOST_MIB for mib in highest.values()), highest
    assert counts["crowd"] >= connections, counts
    kinds = {"garbage", "half-open", "huge prompts", "slow readers", *HTTP_KINDS}
    assert kinds <= counts.keys(), counts
    await chaos.until_at_rest()
    slowest = max(outcome.seconds for outcome in outcomes)
    print(f"{served} served, the slowest in {slowest:.1f} s; {counts}")  # noqa: T201
    print(f"MiB above idle {highest}, above the first half {grown}")  # noqa: T201


async def attack_by_each(
    chaos: ChaosCluster, seconds: float, names: Iterable[str] = CASES, ca: Path | None = None
) -> None:
    """Attack in each way for so long, and hold what another caller saw to the attack's bounds."""
    workers, router = dict(chaos.cluster.workers), chaos.router
    pids = {"router": router.pid} | {name: one.pid for name, one in workers.items()}
    problems = []
    async with (
        attackers(router.address, router.http_address) as crowd,
        watcher(router.address, router.http_address, pids, ca) as watching,
    ):
        for name in names:
            async with crowd.attacking(name):
                seen = await watching.watch(name, seconds)
            problems += seen.beyond(name)
            print(name, seen)  # noqa: T201
    assert not problems
    assert dict(chaos.cluster.workers) == workers, "a worker was replaced"
    assert router.alive
    await chaos.until_at_rest()


def test_every_attack_has_bounds() -> None:
    assert list(CASES) == list(BOUNDS), "the table tells of what is shown"


async def test_short_attacks(ray, tiny):
    async with chaos_cluster(tiny, worker_timeout=WORKER_TIMEOUT_S, prefill=1, decode=1) as chaos:
        await attack_by_each(chaos, 0.4)


@pytest.mark.slow
async def test_attacks_of_ten_seconds(ray, tiny):
    async with chaos_cluster(tiny, worker_timeout=WORKER_TIMEOUT_S) as chaos:
        await attack_by_each(chaos, 10.0)


BOMBS = [f"({letter}{{{first}}}){{{second}}}" for letter in "abcdef" for first, second in [
    (1000, 1000), (900, 1100), (50, 50), (20, 200), (7, 900),
]]  # fmt: skip
"""Grammars of a few bytes that would take much work, or memory, to compile or to follow."""
MOST_GAP_SECONDS, MOST_LEFT_MIB, SETTLED_SECONDS = 0.3, 100.0, 20.0


async def gaps(url: str, seconds: list[float]) -> None:
    """Read one stream after another; note the time between two of their events."""
    body = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=60) as http:
        while True:
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                before = None
                async for _ in answer.aiter_raw():
                    now = time.monotonic()
                    if before is not None:
                        seconds.append(now - before)
                    before = now


@pytest.mark.slow
@pytest.mark.timeout(900)  # each is tried for up to a second of the processor
async def test_grammars_of_few_bytes_and_much_work(ray, tiny):
    """Streams beside them go on, and what they have taken is given back."""
    async with chaos_cluster(tiny, worker_timeout=WORKER_TIMEOUT_S, retract_every=0) as chaos:
        url, workers = f"http://{chaos.router.http_address}", dict(chaos.cluster.workers)
        alone: list[float] = []
        reading = asyncio.create_task(gaps(url, alone))
        await asyncio.sleep(5)
        reading.cancel()
        before, beside = memory(chaos), list[float]()
        reading = asyncio.create_task(gaps(url, beside))
        ask = {"prompt": [1, 2, 3], "max_tokens": 40}
        async with httpx.AsyncClient(timeout=None) as http:
            bodies = [{**ask, "structured_outputs": {"regex": one}} for one in BOMBS]
            calls = [http.post(f"{url}/v1/completions", json=body) for body in bodies]
            answers = await asyncio.gather(*calls)
        assert not reading.done(), reading.exception()
        reading.cancel()
        statuses = {one.status_code for one in answers}
        assert statuses <= {200, 400, 429}, [one.text for one in answers]
        assert 400 in statuses, "some of them are refused at the door"
        print(f"gaps alone {max(alone):.3f} s, beside {max(beside):.3f} s")  # noqa: T201
        assert max(beside) < max(MOST_GAP_SECONDS, 2 * max(alone))
        await asyncio.sleep(SETTLED_SECONDS)
        left = {name: mib - before[name] for name, mib in memory(chaos).items()}
        print(f"MiB left {left}")  # noqa: T201
        assert max(left.values()) < MOST_LEFT_MIB
        assert dict(chaos.cluster.workers) == workers, "a worker was replaced"
        await chaos.until_at_rest()


@pytest.mark.slow
async def test_handshakes_at_a_door_with_tls(ray, tiny, tmp_path):
    files = Authority(tmp_path / "tls").issue()
    async with chaos_cluster(tiny, worker_timeout=WORKER_TIMEOUT_S, router_tls=files) as chaos:
        await attack_by_each(chaos, 10.0, ["handshakes"], files.ca)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_all_of_them_for_two_minutes(ray, tiny):
    async with chaos_cluster(tiny, worker_timeout=WORKER_TIMEOUT_S) as chaos:
        await attack(chaos, 120.0, 2000)
