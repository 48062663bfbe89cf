"""Who may renew leases, and when a worker's death may be believed: in any order of events.

A virtual time, clocks that differ in time and rate, messages that are late, lost or overtaken, and
controllers that take over while their predecessors still run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.leadership import begin_epoch
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.engine.worker.worker_lease import Renewal, StaleEpochError, WorkerLease

TIMES = LeaseTimes(worker_seconds=30, controller_seconds=20)
SILENCE_SECONDS = 8.0
DRIFT = 0.01
STORE = object()


@dataclass(eq=False)
class Worker:
    name: str
    clock: Callable[[], float]
    frozen: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Messages that came while it was frozen."""
    lease: WorkerLease = field(init=False)

    def __post_init__(self) -> None:
        self.lease = WorkerLease(self.clock)
        self.lease.begin(TIMES.worker_seconds, lambda: None)


@dataclass(eq=False)
class Controller:
    leases: Leases
    clock: Callable[[], float]
    stamps: dict[str, float | None]
    """Of the workers that it knows: their latest."""
    heard: dict[str, float]
    """When it arrived."""
    cut_off: set[object]
    """What it cannot reach: workers, or `STORE`."""


class World:
    """Controllers that each believe to be the only one, and what they may do to workers.

    Args:
        seed: of everything that happens.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.epoch = 0
        self.workers: dict[str, Worker] = {}
        """Those that the store knows."""
        self.controllers: list[Controller] = []
        self.messages: list[tuple[float, int, Callable[[], None]]] = []
        """With the time of their arrival."""
        self.believed_dead: set[Worker] = set()
        self.begin_epoch()
        for _ in range(3):
            self.start_worker(self.controllers[0])

    def clock(self) -> Callable[[], float]:
        offset, rate = self.random.uniform(-1e6, 1e6), 1 + self.random.uniform(-DRIFT, DRIFT) / 2
        return lambda: offset + rate * self.time

    def send(self, arrive: Callable[[], None]) -> None:
        """Most messages arrive at once; some take long, or never arrive."""
        kind = self.random.random()
        if kind < 0.05:
            return
        delay = 0.01 if kind < 0.85 else self.random.uniform(0, 30)
        heapq.heappush(self.messages, (self.time + delay, self.random.getrandbits(60), arrive))

    def begin_epoch(self) -> None:
        """A controller takes over, whether the others have noticed or not."""
        self.epoch += 1
        clock = self.clock()
        leases = Leases(self.epoch, TIMES, began=clock())
        cut_off: set[object] = {one for one in self.workers.values() if self.random.random() < 0.4}
        stamps, heard = dict.fromkeys(self.workers), dict.fromkeys(self.workers, clock())
        controller = Controller(leases, clock, stamps, heard, cut_off)
        self.controllers = [*self.controllers[-2:], controller]

    def start_worker(self, controller: Controller) -> None:
        worker = Worker(f"worker-{self.random.getrandbits(40)}", self.clock())
        controller.leases.heard(worker.name, controller.clock())
        controller.stamps[worker.name] = None
        controller.heard[worker.name] = controller.clock()
        self.workers[worker.name] = worker

    def forget_the_dead(self) -> None:
        """All but the latest workers are of no interest any more."""
        for name in list(self.workers)[:-5]:
            del self.workers[name]
            for controller in self.controllers:
                controller.stamps.pop(name, None)

    def ask_store(self, controller: Controller) -> None:
        asked_at = controller.clock()

        def answer() -> None:
            latest = self.epoch

            def arrive() -> None:
                if latest > controller.leases.epoch:
                    controller.leases.give_up()
                else:
                    controller.leases.hold(asked_at)

            self.send(arrive)

        self.send(answer)

    def ask_worker(self, controller: Controller, worker: Worker) -> None:
        """For a sign of life, and renew its lease unless it has been silent for too long."""
        name, now, renewal = worker.name, controller.clock(), None
        if now - controller.heard[name] < SILENCE_SECONDS:
            renewal = controller.leases.renew(name, controller.stamps[name], now)

        def arrive() -> None:
            if worker.frozen:
                worker.waiting.append(arrive)  # its kernel keeps the message
            else:
                self.renew(controller, worker, renewal)

        self.send(arrive)

    def renew(self, controller: Controller, worker: Worker, renewal: Renewal | None) -> None:
        try:
            if renewal is not None:
                worker.lease.renew(renewal)
        except StaleEpochError:
            self.send(controller.leases.give_up)
            return
        stamp = worker.lease.stamp()

        def arrive() -> None:
            if worker.name in controller.stamps:
                controller.stamps[worker.name] = stamp
                controller.heard[worker.name] = controller.clock()

        self.send(arrive)

    def step(self) -> None:
        """Let some time pass in which anything may break, and everybody do its duties once."""
        self.time += self.random.choice((0.5, 2, 5))
        while self.messages and self.messages[0][0] <= self.time:
            heapq.heappop(self.messages)[2]()
        self.break_or_mend()
        for controller in self.controllers:
            if STORE not in controller.cut_off:
                self.ask_store(controller)
            for name in controller.stamps:
                worker = self.workers[name]
                if worker not in controller.cut_off:
                    self.ask_worker(controller, worker)
                if controller.leases.is_over(name):
                    self.believed_dead.add(worker)
        for worker in self.believed_dead:
            assert worker.lease.has_run_out, f"{worker.name} may serve though it is called dead"

    def break_or_mend(self) -> None:
        controller = self.random.choice(self.controllers)
        worker = self.random.choice(list(self.workers.values()))
        kind = self.random.random()
        if kind < 0.1:
            controller.cut_off ^= {self.random.choice((STORE, worker))}
        elif kind < 0.15:
            worker.frozen = not worker.frozen
            waiting, worker.waiting = worker.waiting, []
            for arrive in waiting:
                self.send(arrive)
        elif kind < 0.17:
            self.begin_epoch()
        elif kind < 0.27 and controller.leases.epoch == self.epoch:
            self.start_worker(controller)
            self.forget_the_dead()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**40))
def test_no_death_is_believed_while_the_worker_may_serve_or_ever_will(seed: int):
    world = World(seed)
    for _ in range(200):
        world.step()


def test_workers_whose_controller_can_be_reached_live_on():
    world = World(0)
    world.break_or_mend = lambda: None  # type: ignore[method-assign]
    world.send = lambda arrive: arrive()  # type: ignore[method-assign]
    for _ in range(300):
        world.step()
    assert not world.believed_dead
    assert not any(worker.lease.has_run_out for worker in world.workers.values())


def make_leases(epoch: int = 1, began: float = 0.0) -> Leases:
    return Leases(epoch, TIMES, began=began)


def test_a_death_is_believed_in_the_end():
    leases = make_leases()
    leases.heard("one", 0.0)
    assert leases.over_at("one") == 30 + TIMES.margin_seconds
    leases.hold(leases.over_at("one") - 0.1)
    assert not leases.is_over("one"), "a successor may have begun, and have renewed it"
    leases.hold(leases.over_at("one"))
    assert leases.is_over("one")


def test_a_worker_whose_clock_is_slow_serves_no_more_when_its_death_is_believed():
    """And one second of work that it had begun has ended."""
    now = 0.0
    lease = WorkerLease(lambda: now * 0.9)
    lease.begin(TIMES.worker_seconds, lambda: None)
    leases = make_leases()
    leases.heard("one", now)
    now = leases.over_at("one") - 1
    assert lease.has_run_out


def test_a_successor_believes_no_death_before_its_predecessors_promises_are_over():
    leases = make_leases(epoch=2, began=100.0)
    assert leases.over_at("never-heard-of") == 100 + 20 + 30 + TIMES.margin_seconds
    leases.heard("heard", 101.0)
    assert leases.over_at("heard") == leases.over_at("never-heard-of")


def test_who_cannot_reach_the_store_renews_nothing():
    leases = make_leases()
    assert leases.renew("one", None, 19.9) is not None
    assert leases.renew("one", None, 20.0) is None
    leases.hold(14.0)
    assert leases.renew("one", None, 33.9) is not None


def test_who_has_a_successor_renews_nothing_and_believes_no_death():
    leases = make_leases()
    leases.give_up()
    leases.hold(1000.0)
    assert leases.renew("one", None, 1.0) is None
    assert not leases.is_over("one")


class BrokenStore(InProcessStore):
    """One that is asked by two at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.rivals = 2

    async def put_new(self, key: str, value: bytes) -> bool:
        if self.rivals:
            self.rivals -= 1
            await super().put_new(key, b"a rival's")
        return await super().put_new(key, value)


async def test_epochs_grow_and_no_two_controllers_have_the_same():
    store = InProcessStore()
    epochs = [(await begin_epoch(store, TIMES)).epoch for _ in range(3)]
    assert epochs == [1, 2, 3]
    assert await store.keys("epoch/") == ["epoch/3"]
    assert (await begin_epoch(BrokenStore(), TIMES)).epoch == 3
