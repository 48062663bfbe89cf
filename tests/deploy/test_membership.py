"""What a router is told of the workers, change by change."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.deploy.controller.supervision.membership import Membership
from tests.worker_infos import worker_info

FIRST, SECOND = worker_info(life=1), worker_info(life=2)


@pytest.fixture
def members() -> Membership:
    members = Membership()
    members.add_live(FIRST)
    return members


def listed(members: Membership) -> list[tuple[str, bool]]:
    return [(one.incarnation, one.draining) for one in members.discovery.endpoints()]


def test_a_worker_that_dies_is_not_listed_until_its_successor_is_live(members: Membership):
    members.remove_live(FIRST)
    members.add_dead(FIRST)
    assert listed(members) == []
    assert members.discovery.awaited() == (FIRST,)
    members.add_live(SECOND)
    assert listed(members) == [("decode-0-2", False)]
    assert members.discovery.awaited() == ()


def test_a_worker_that_is_removed_is_not_awaited(members: Membership):
    members.add_draining(FIRST)
    members.remove_live(FIRST)
    assert members.discovery.awaited() == (), "it is listed still"
    members.remove_awaited(FIRST)
    assert listed(members) == []
    assert members.discovery.awaited() == ()


def test_a_worker_that_drains_is_listed_until_its_successor_is_live(members: Membership):
    members.add_draining(FIRST)
    assert listed(members) == [("decode-0-1", True)]
    assert members.live == {"decode-0": FIRST}
    members.remove_live(FIRST)
    members.add_dead(FIRST)
    assert listed(members) == [("decode-0-1", True)]
    members.add_live(SECOND)
    assert listed(members) == [("decode-0-2", False)]
    assert not members.is_draining("decode-0")


def test_a_worker_that_drains_and_was_not_reachable_for_a_while_drains_still(members: Membership):
    members.add_draining(FIRST)
    members.remove_live(FIRST)
    members.add_live(FIRST)
    assert listed(members) == [("decode-0-1", True)]
    assert members.live == {"decode-0": FIRST}
    members.remove_draining(FIRST)
    assert listed(members) == [("decode-0-1", False)]


def test_a_drain_that_failed_leaves_a_successors_alone(members: Membership):
    members.add_draining(FIRST)
    members.remove_draining(FIRST)
    assert listed(members) == [("decode-0-1", False)]
    members.add_draining(SECOND)
    members.remove_draining(FIRST)
    assert members.is_draining("decode-0")


async def test_deaths_and_successors_can_be_awaited(members: Membership):
    dead = asyncio.create_task(members.until_dead(FIRST))
    members.remove_live(FIRST)
    live = asyncio.create_task(members.until_live("decode-0"))
    await asyncio.sleep(0)
    assert not dead.done()
    members.add_dead(FIRST)
    await asyncio.wait_for(dead, 60)
    assert not live.done()
    members.add_live(SECOND)
    assert await asyncio.wait_for(live, 60) == SECOND
