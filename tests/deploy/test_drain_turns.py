"""Workers that all want to drain do so few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvrelay.deploy.controller.changes.workforce import DrainTurns
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.worker_infos import worker_info


class Role:
    """Workers that are live, and those of them that want to drain."""

    def __init__(self, *names: str) -> None:
        self.members = Membership()
        self.lives = {name: worker_info(name) for name in names}
        for info in self.lives.values():
            self.members.add_live(info)
        self.turns = DrainTurns(self.members, self.roles)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def roles(self) -> Mapping[str, WorkerRole]:
        return {name: info.role for name, info in self.lives.items()}

    def wants_to_drain(self, name: str, *, healed: bool = False) -> None:
        """Let a worker drain in its turn, unless it is `healed` by then."""
        self.tasks[name] = asyncio.create_task(self._drain(self.lives[name], healed))

    async def _drain(self, info: WorkerInfo, healed: bool) -> None:
        async with self.turns.turn(info):
            await asyncio.sleep(0)  # it is asked whether it still has to
            if not healed:
                self.members.add_draining(info)

    def is_replaced(self, name: str) -> None:
        """The worker's process ends, and another one is there."""
        self.dies(name)
        self.lives[name] = worker_info(name, 2)
        self.members.add_live(self.lives[name])

    def dies(self, name: str) -> None:
        self.members.remove_live(self.lives[name])
        self.members.add_dead(self.lives[name])

    async def drains(self) -> list[str]:
        """Who drains once all have had time to begin."""
        for _ in range(50):
            await asyncio.sleep(0)
        return [name for name in self.lives if self.members.is_draining(name)]


async def test_the_next_one_drains_when_the_successor_is_live():
    role = Role("decode-0", "decode-1", "decode-2")
    for name in role.lives:
        role.wants_to_drain(name)
    assert await role.drains() == ["decode-0"]
    role.members.remove_live(role.lives["decode-0"])
    role.members.add_dead(role.lives["decode-0"])
    assert await role.drains() == ["decode-0"], "its successor is not there yet"
    role.members.add_live(worker_info("decode-0", 2))
    assert await role.drains() == ["decode-1"]
    role.is_replaced("decode-1")
    assert await role.drains() == ["decode-2"]


async def test_each_role_has_its_own_turns():
    role = Role("decode-0", "decode-1", "prefill-0")
    for name in role.lives:
        role.wants_to_drain(name)
    assert await role.drains() == ["decode-0", "prefill-0"]


async def test_a_tenth_of_many_workers_drain_at_a_time():
    role = Role(*(f"decode-{number}" for number in range(29)))
    for name in role.lives:
        role.wants_to_drain(name)
    assert await role.drains() == ["decode-0", "decode-1"]


async def test_who_has_its_memory_back_gives_its_turn_to_the_next():
    role = Role("decode-0", "decode-1")
    role.wants_to_drain("decode-0", healed=True)
    role.wants_to_drain("decode-1")
    assert await role.drains() == ["decode-1"]


async def test_nobody_drains_while_another_is_lost_or_drained_by_an_operator():
    role = Role("decode-0", "decode-1", "decode-2")
    role.dies("decode-0")
    role.members.add_draining(role.lives["decode-1"])
    role.wants_to_drain("decode-2")
    assert await role.drains() == ["decode-1"]
    role.is_replaced("decode-1")
    assert await role.drains() == [], "decode-0 is not back"
    role.members.add_live(worker_info("decode-0", 2))
    assert await role.drains() == ["decode-2"]


async def test_nobody_drains_beside_one_that_drains_and_was_not_reachable_for_a_while():
    role = Role("decode-0", "decode-1")
    role.wants_to_drain("decode-0")
    role.wants_to_drain("decode-1")
    assert await role.drains() == ["decode-0"]
    role.members.remove_live(role.lives["decode-0"])
    role.members.add_live(role.lives["decode-0"])
    assert await role.drains() == ["decode-0"]
    role.is_replaced("decode-0")
    assert await role.drains() == ["decode-1"]


async def test_who_is_lost_while_it_waits_takes_no_turn():
    role = Role("decode-0", "decode-1", "decode-2")
    for name in role.lives:
        role.wants_to_drain(name)
    assert await role.drains() == ["decode-0"]
    role.tasks["decode-1"].cancel()
    role.is_replaced("decode-1")
    role.is_replaced("decode-0")
    assert await role.drains() == ["decode-2"]


async def test_the_only_one_of_its_role_drains_at_once():
    role = Role("decode-0", "prefill-0")
    role.members.remove_live(role.lives["prefill-0"])
    role.wants_to_drain("decode-0")
    assert await role.drains() == ["decode-0"]
