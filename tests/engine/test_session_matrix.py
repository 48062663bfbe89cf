"""The fault matrix of sessions and tiers under a virtual clock: who dies, and when.

Conversations run at the same time in little memory. As soon as a worker is *saving* a turn into
its session, *borrowing*, *prefetching* from the host or *writing back* to it, *storing* below the
host or *fetching* from there, a prefill worker, a decode worker or the router dies: a worker in the
middle of that pass of its loop, before it has told anybody. Or its copies fail there, and leave
nobody's bytes. Each turn has its tokens all the same, the sessions go on, and every page comes
back.
`tests/chaos` does the same to processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum

import pytest

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.session_turns import SessionTurns
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.tier_copies import PageMoves
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.storage.storage_orders import Fetch, StorageOrder, Store
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from tests.engine.conversations import Conversation
from tests.engine.simulation import SimWorker, reference
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.simulation.storage import MemoryStore, SharedPages
from tests.engine.simulation.worker import PAGE_BYTES
from tests.pairwise import few, share

TIER_PHASES = (
    Phase.PREFETCHING,
    Phase.WRITING_BACK,
    Phase.STORING,
    Phase.FETCHING,
)
STORAGE_PHASES = (Phase.STORING, Phase.FETCHING)
TURNS = 4
COPY_SECONDS = 0.001
"""Of a page: a tenth of what computing its tokens takes."""


class Victim(StrEnum):
    """Who dies."""

    PREFILL = "P"
    DECODE = "D"
    ROUTER = "router"
    NOBODY = "nobody"


class Killed(Exception):  # noqa: N818
    """A worker dies here."""


class Mortal(Clockwork):
    """A cluster of which one dies when a worker comes to a phase.

    Args:
        phase: that is waited for.
        by_prefill: a prefill worker comes to it, not a decode worker.
        victim: who dies.
        nth: so often the phase is come to, by any worker of that role.
    """

    def __init__(self, phase: Phase, by_prefill: bool, victim: Victim, nth: int, seed: int) -> None:
        tiers, storage = phase in TIER_PHASES, phase in STORAGE_PHASES
        self.shared: SharedPages = {}
        super().__init__(
            seed,
            page_size=4,
            pages=44 if tiers else 100,
            rows=6,
            chunk=16,
            cached=tiers,
            host_pages=(16 if storage else 400) if tiers else 0,
            make_store=self.make_store if storage else None,
            growth_min=0.0,
        )
        self.left, self.phase, self.victim, self.dead = nth, phase, victim, False
        self.router_died = False
        for worker in self.workers:
            self._set_clock(worker)
        for worker in self.prefills if by_prefill else self.decodes:
            worker.faults.reach = self._watch(worker)  # type: ignore[method-assign]

    def _set_clock(self, worker: SimWorker) -> None:
        worker.kv_cache.clock = self.now
        if worker.tier is not None:
            worker.tier.loads.speed = TierSpeed(PAGE_BYTES / COPY_SECONDS)
            if worker.tier.storage is not None:
                worker.tier.storage.speed = TierSpeed(PAGE_BYTES / COPY_SECONDS)

    def make_store(self, worker: SimWorker) -> MemoryStore:
        """What a worker keeps below its host, with all others."""
        return MemoryStore(self.shared, lambda: worker.counting.host_kv)

    def _watch(self, worker: SimWorker) -> Callable[..., None]:
        def reach(phase: Phase, peer: str = "") -> None:
            if phase is not self.phase or self.dead:
                return
            self.left -= 1
            if not self.left:
                self.dead = True
                self._strike(worker, peer)

        return reach

    def _strike(self, worker: SimWorker, peer: str) -> None:
        """Kill this worker at once; or its peer, another one, or the router, after its pass."""
        if self.victim is Victim.NOBODY:
            return
        role = self.prefills if self.victim is Victim.PREFILL else self.decodes
        if self.victim is Victim.ROUTER:
            self.router_died = True
        elif worker in role:
            self.dying = worker
            raise Killed
        else:
            self.dying = self.by_name.get(peer, role[0])

    dying: SimWorker | None = None

    def step(self) -> bool:
        """See `Simulation`; what is to die dies."""
        try:
            moved = super().step()
        except Killed:
            moved = True
        if self.dying is not None:
            worker, self.dying = self.dying, None
            self._set_clock(self.kill(worker))
        return moved

    def copy_seconds(self, worker: SimWorker, moves: PageMoves) -> float:
        """See `Clockwork`."""
        return COPY_SECONDS * moves.num_pages

    def storage_seconds(self, order: StorageOrder) -> float:
        """See `Clockwork`."""
        return COPY_SECONDS * len(order.pages) if isinstance(order, Fetch | Store) else 0.0

    def replace_router(self) -> None:
        """Its streams end, and those of another one come."""
        self.router_died = False
        for request in self.submitted:
            request.lost_worker = True
        for worker in self.workers:
            self.detach(worker)


def play(simulation: Mortal, local: bool, seed: int) -> list[Conversation]:
    """Let six conversations have their turns, each again if its router dies in it."""
    rng = random.Random(seed)
    sessions = [Conversation(simulation, str(number)) for number in range(6)]
    script = {one: [rng.choices(range(97), k=30) for _ in range(TURNS)] for one in sessions}
    said: dict[Conversation, int] = dict.fromkeys(sessions, 0)
    while any(len(one.tokens) < TURNS * 38 for one in sessions):
        for one in sessions:
            before = len(one.tokens)
            one.take()
            said[one] += len(one.tokens) > before
            if one.turn is None and said[one] < TURNS:
                decode = one.worker if one.worker in simulation.workers else None
                decode = decode or rng.choice(simulation.decodes)
                prefill = decode if local else rng.choice(simulation.prefills)
                one.say(script[one][said[one]], 8, place=(prefill, decode))
        simulation.run_until(simulation.clock + 0.02)
        if simulation.router_died:
            simulation.replace_router()
            simulation.run_until(simulation.clock + 0.02)
            for one in sessions:
                one.turn, one.worker = None, None
        assert simulation.clock < 600, "some turn has no end"
    return sessions


CELLS = [
    (Phase.SAVING, False),
    (Phase.BORROWING, False),
    (Phase.BORROWING, True),
    (Phase.PREFETCHING, False),
    (Phase.PREFETCHING, True),
    (Phase.WRITING_BACK, False),
    (Phase.WRITING_BACK, True),
    (Phase.STORING, False),
    (Phase.STORING, True),
    (Phase.FETCHING, False),
    (Phase.FETCHING, True),
]
"""A phase, and whether a prefill worker comes to it."""


@few(4)
@pytest.mark.parametrize(
    ("cell", "victim"),
    share(CELLS, [Victim.PREFILL, Victim.DECODE, Victim.ROUTER], one_in=3),
    ids=lambda value: f"{value}",
)
@pytest.mark.parametrize("nth", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_death_costs_no_token_no_session_and_no_page(
    cell: tuple[Phase, bool], victim: Victim, nth: int
) -> None:
    phase, by_prefill = cell
    seed = 1 if phase in STORAGE_PHASES else nth  # with others a decode worker seldom fetches
    survives(Mortal(phase, by_prefill, victim, nth, seed), by_prefill, seed)


class Failing(Mortal):
    """A cluster whose copies of one kind fail, and leave nobody's bytes; see `Mortal`.

    Args:
        every: so manieth of each worker fails, from the first one on.
    """

    def __init__(
        self, phase: Phase, by_prefill: bool, victim: Victim, every: int, seed: int
    ) -> None:
        self.every, self.phase = every, phase
        self.tries, self.failed = 0, 0
        super().__init__(phase, by_prefill, victim, 2, seed)

    def _set_clock(self, worker: SimWorker) -> None:
        super()._set_clock(worker)
        worker.copy_fails = lambda moves: self._fails(
            Phase.WRITING_BACK if moves.to_host else Phase.PREFETCHING
        )

    def make_store(self, worker: SimWorker) -> MemoryStore:
        """See `Mortal`. Pages fail one by one."""
        store = super().make_store(worker)
        store.fails = lambda page, is_write: self._fails(
            Phase.STORING if is_write else Phase.FETCHING
        )
        return store

    def _fails(self, phase: Phase) -> bool:
        if phase is not self.phase:
            return False
        self.tries += 1
        fails = self.tries % self.every == 0
        self.failed += fails
        return fails


@few(4)
@pytest.mark.parametrize(
    ("cell", "victim"),
    share(
        [cell for cell in CELLS if cell[0] in TIER_PHASES],
        [Victim.NOBODY, Victim.PREFILL, Victim.DECODE],
        one_in=3,
    ),
    ids=lambda value: f"{value}",
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_copies_that_fail_cost_no_token_no_session_and_no_page(
    cell: tuple[Phase, bool], victim: Victim, every: int
) -> None:
    phase, by_prefill = cell
    simulation = Failing(phase, by_prefill, victim, every, seed=1)
    survives(simulation, by_prefill, seed=1)
    assert simulation.failed, "no copy has failed"


def survives(simulation: Mortal, by_prefill: bool, seed: int) -> None:
    """Conversations have their turns whatever happens, and nothing is left of them."""
    # What a prefill worker computes is not loaded by the decode worker that reads it.
    local = simulation.phase in (Phase.PREFETCHING, Phase.FETCHING) and not by_prefill
    sessions = play(simulation, local, seed)
    assert simulation.dead, "nobody came to this"
    names = {worker.name[-1] for worker in simulation.workers}
    assert ("'" in names) is (simulation.victim in (Victim.PREFILL, Victim.DECODE))
    for request in simulation.submitted:
        expected = reference(request.prompt, request.max_tokens)
        assert request.output == expected[: len(request.output)]
        assert len(request.output) == request.max_tokens or request.disturbed
    for one in sessions:
        assert len(one.tokens) == TURNS * 38
        one.close()
    simulation.run_until(simulation.clock + 10)
    simulation.assert_at_baseline()


def sessions_outlive_their_router(patch: pytest.MonkeyPatch) -> None:
    """A router's end leaves its sessions what they have."""
    patch.setattr(SessionTurns, "end_all", lambda self, link=None: None)


def nobody_is_told_of_a_death(patch: pytest.MonkeyPatch) -> None:
    """The pages of a read that never ends stay in quarantine."""
    patch.setattr(PrefillScheduler, "peer_died", lambda self, incarnation: None)


def ends_of_copies_are_lost(patch: pytest.MonkeyPatch) -> None:
    """What a copy from the host was to bring is held for ever."""
    patch.setattr(HostTier, "finish", lambda self, ended: None)


@few(1)
@pytest.mark.parametrize(("plant", "phase", "by_prefill", "victim", "nth"), [
    # In the last turn: before, their room is taken for others.
    (sessions_outlive_their_router, Phase.SAVING, False, Victim.ROUTER, 6 * TURNS),
    (nobody_is_told_of_a_death, Phase.BORROWING, True, Victim.DECODE, 1),
    (ends_of_copies_are_lost, Phase.WRITING_BACK, False, Victim.PREFILL, 1),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    phase: Phase,
    by_prefill: bool,
    victim: Victim,
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_a_death_costs_no_token_no_session_and_no_page((phase, by_prefill), victim, nth)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_death_costs_no_token_no_session_and_no_page((phase, by_prefill), victim, nth)
