"""A decode worker reads what a prefill worker has on its host, before it is on the device there.

The model counts: a page that is read with other bytes changes the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrelay.decode_worker.hand_over_stream import PeerProbed
from kvrelay.engine.scheduler.commands import PeerDied
from kvrelay.kv_transfer.pull import Pull
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.output import EndReason, FailureReason
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count
from tests.engine.test_modes import expected
from tests.known import known
from tests.pairwise import few

LENGTH, PAGE = 48, 4
PAGES = LENGTH // PAGE


class Held(Simulation):
    """A pair whose prefill worker's copies to the device, or whose reads, can be held back."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.copies_held = self.reads_held = False
        super().__init__(
            seed, PAGE, 120 // PAGE, 6, 16, workers=1, host_pages=400, growth_min=0.0, **options
        )
        rng = random.Random(7)
        self.prompts = [[rng.randrange(97) for _ in range(LENGTH + 1)] for _ in range(6)]
        for prompt in self.prompts:
            self.ask(prompt)
        # Now the first of these lie on the host alone.
        self.pulls.clear()

    def ask(self, prompt: list[int]) -> None:
        request = self.submit(prompt, 4)
        self.run()
        assert request.output == expected(request)

    def ask_of_the_host(self, prompt: list[int]) -> None:
        """As `ask`; what lies on the host comes to the device after the decode worker's grant."""
        self.copies_held = True
        request = self.submit(prompt, 4)
        self.run()
        self.copies_held = False
        self.run()
        assert request.output == expected(request)

    @property
    def prefill(self) -> SimWorker:
        return self.prefills[0]

    @property
    def decode(self) -> SimWorker:
        return self.decodes[0]

    def can_end_copy(self, worker: SimWorker) -> bool:
        return worker.copies[0].to_host or worker is self.decode or not self.copies_held

    def end_read(self, worker: SimWorker) -> None:
        if not self.reads_held:
            super().end_read(worker)

    def run_until(self, happened: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if happened():
                return
            assert self.step(), "nothing can happen any more"
        raise AssertionError("it does not happen")

    @property
    def on_prefill(self) -> list[PrefillRequest]:
        return list(self.prefill.context.requests.values())


def host_pages_read(pulls: list[Pull]) -> int:
    return sum(pull.num_pages for pull in pulls if pull.from_host)


def test_the_host_is_read_while_the_prefix_comes_to_the_device() -> None:
    simulation = Held()
    before = count(simulation.prefill, "computed_tokens")
    simulation.copies_held = True
    request = simulation.submit(simulation.prompts[0], 4)
    simulation.run()
    assert host_pages_read(simulation.pulls) == PAGES
    assert not request.output
    assert [r.lease for r in simulation.on_prefill] == [None], "it holds nothing on the device"
    counts = known(simulation.prefill.tier).pages.counts()
    assert counts.cached_protected == PAGES
    simulation.copies_held = False
    simulation.prefill.end_copy()
    simulation.run()
    assert request.output == expected(request)
    assert count(simulation.prefill, "computed_tokens") - before == 1
    assert count(simulation.decode, "transfer_host_pages") == PAGES
    assert known(simulation.prefill.tier).counts.lent_pages >= PAGES
    simulation.assert_at_baseline()


def test_the_host_is_read_while_the_prompt_is_computed_again() -> None:
    """Nobody waits for a load that is not worth it; the decode worker has what is on the host."""
    simulation = Held()
    loads = simulation.prefill.scheduler._queue._loads
    loads._patience = lambda *_: 0.0
    request = simulation.submit(simulation.prompts[0], 4)
    simulation.run()
    assert request.output == expected(request)
    assert host_pages_read(simulation.pulls) == PAGES
    simulation.assert_at_baseline()


def test_the_host_is_read_while_the_prompt_waits_for_memory() -> None:
    """Who has the device does not let go of it: the one behind is read from the host."""
    simulation = Held()
    simulation.reads_held = True
    first = [simulation.submit([60 + n] * 90, 4) for n in range(2)]
    simulation.run_until(lambda: any(r.hand_over.is_announced for r in simulation.on_prefill))
    request = simulation.submit(simulation.prompts[0], 4)
    for _ in range(3_000):
        simulation.step()
    simulation.reads_held = False
    simulation.run()
    assert all(one.output == expected(one) for one in [*first, request])
    assert host_pages_read(simulation.pulls)
    simulation.assert_at_baseline()


def settle(simulation: Simulation) -> None:
    """A read that has failed ends when its peer is dead."""
    for _ in range(3_000):
        simulation.step()
    simulation.settle_deaths()
    simulation.run()


WHEN: dict[str, Callable[[Held], bool]] = {
    "announced": lambda held: any(request.lent for request in held.on_prefill),
    "reading": lambda held: any(pull.from_host for pull, _ in held.decode.agent.ordered),
    "read": lambda held: host_pages_read(held.pulls) > 0,
    "computing": lambda held: any(r.lent and r.lease is not None for r in held.on_prefill),
    "all announced": lambda held: any(r.lent and r.hand_over.is_announced for r in held.on_prefill),
}


def lose_prefill(simulation: Held, request: SimRequest) -> None:
    simulation.decode.inbox.post(PeerDied(simulation.prefill.name))
    simulation.break_stream()


def lose_decode(simulation: Held, request: SimRequest) -> None:
    simulation.prefill.inbox.post(PeerDied(simulation.decode.name))
    simulation.break_stream()


HOW: dict[str, Callable[[Held, SimRequest], None]] = {
    "the stream breaks": lambda held, request: held.break_stream(),
    "cancelled here": lambda held, request: held.cancel(request, held.prefill),
    "cancelled there": lambda held, request: held.cancel(request, held.decode),
    "a read fails": lambda held, request: held.fail_read(),
    "the prefill worker is lost": lose_prefill,
    "the decode worker is lost": lose_decode,
    "forgotten meanwhile": lambda held, request: known(held.prefill.tier).forget(
        known(held.prefill.tier).hash(request_ids(request), "")[:32]
    ),
}


def request_ids(request: SimRequest) -> Any:
    return np.asarray(request.prompt, np.int32)


@few(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("when", WHEN)
def test_pages_of_the_host_are_held_until_the_stream_ends(when: str, how: str) -> None:
    """And not longer; what is evicted and written on the host meanwhile touches none of them."""
    simulation = Held()
    held_back = when in ("announced", "reading", "read")
    simulation.copies_held, simulation.reads_held = held_back, when != "read"
    request = simulation.submit(simulation.prompts[0], 4)
    if when in ("computing", "all announced"):
        simulation.copies_held = True
        simulation.run_until(lambda: WHEN["reading"](simulation))
        simulation.copies_held = False
    simulation.run_until(lambda: WHEN[when](simulation))
    pages = known(simulation.prefill.tier).pages
    assert pages.counts().cached_protected == PAGES
    HOW[how](simulation, request)
    simulation.copies_held = simulation.reads_held = False
    settle(simulation)
    if not request.disturbed:
        assert request.output == expected(request)
    simulation.assert_at_baseline()
    for prompt in simulation.prompts[:2] if "lost" not in how else ():
        simulation.ask(prompt)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("was_read", [False, True])
def test_a_host_whose_first_read_fails_is_not_read_again(was_read: bool) -> None:
    """No transport may reach it: another attempt must not fail for that. Not if one has."""
    simulation = Held()
    failing, later = simulation.prompts[0], simulation.prompts[2]
    if was_read:
        simulation.ask_of_the_host(simulation.prompts[1])
        assert host_pages_read(simulation.pulls) == PAGES
    simulation.reads_held = simulation.copies_held = True
    simulation.submit(failing, 4)
    simulation.run_until(lambda: WHEN["reading"](simulation))
    simulation.fail_read()
    simulation.reads_held = simulation.copies_held = False
    settle(simulation)
    simulation.pulls.clear()
    simulation.ask_of_the_host(later)
    assert host_pages_read(simulation.pulls) == (PAGES if was_read else 0)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("later_probe", ["none", "reads it", "fails"])
def test_a_host_that_the_probe_could_not_read_costs_no_attempt(later_probe: str) -> None:
    """A later probe that does read it makes it readable; one that fails does not undo that."""
    simulation = Held()
    name = simulation.prefill.name

    def probe(**host: Any) -> None:
        simulation.decode.inbox.post(PeerProbed(PeerTransport(name, **host)))

    probe(host_refusal="no transport")
    simulation.ask_of_the_host(simulation.prompts[0])
    assert not host_pages_read(simulation.pulls)
    if later_probe != "none":
        probe(host_bytes_per_second=1e9)
    if later_probe == "fails":
        probe(host_refusal="it was not read in 2 s")
    simulation.pulls.clear()
    simulation.ask_of_the_host(simulation.prompts[2])
    assert host_pages_read(simulation.pulls) == (0 if later_probe == "none" else PAGES)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("corrupt", [False, True])
def test_what_was_read_from_the_host_is_compared_with_the_host(corrupt: bool) -> None:
    """Both have the same bytes; the device's, computed anew, need not be the same to the last."""
    simulation = Held(verify_pages=VerifyPages.ALL)

    def flip(worker: SimWorker, pull: Pull) -> None:
        if pull.from_host and corrupt:
            worker.counting.kv[0][pull.local_pages[0][0], 0] ^= 1

    simulation.on_read = flip  # type: ignore[method-assign]
    simulation.copies_held = True
    request = simulation.submit(simulation.prompts[0], 4)
    simulation.run_until(lambda: WHEN["reading"](simulation))
    simulation.copies_held = False
    simulation.run()
    assert host_pages_read(simulation.pulls) == PAGES
    end = request.ends[simulation.decode.name]
    if corrupt:
        assert (end.reason, end.cause) == (EndReason.FAILED, FailureReason.PAGE_MISMATCH)
    else:
        assert request.output == expected(request)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_in_any_order(seed: int) -> None:
    """Requests with shared beginnings, on a host so small that it evicts all the time."""
    simulation = Simulation(
        seed, PAGE, 120 // PAGE, 6, 16, host_pages=60, growth_min=0.0, workers=2
    )
    rng = random.Random(seed)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(20, 60))] for _ in range(6)]
    events = [simulation.break_stream, simulation.fail_read]
    for _ in range(50):
        prompt = [*rng.choice(prompts), *(rng.randrange(97) for _ in range(rng.randint(0, 6)))]
        request = simulation.submit(prompt, rng.randint(1, 8))
        for _ in range(rng.randint(0, 60)):
            simulation.step()
        if rng.random() < 0.1:
            rng.choice(events)()
        if rng.random() < 0.05:
            simulation.cancel(request, rng.choice([request.prefill, request.decode]))
    settle(simulation)
    right = [one for one in simulation.submitted if not one.disturbed]
    assert len(right) > 10
    assert all(one.output == expected(one) for one in right)
    assert sum(count(worker, "transfer_host_pages") for worker in simulation.decodes)
    simulation.assert_at_baseline()
