"""What living workers are still to be told, death by death."""

from __future__ import annotations

import asyncio
import math

from kvrelay.deploy.controller.records.deaths import Deaths
from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.engine.worker.worker_lease import boottime


def journal() -> Journal:
    return Journal(InProcessStore(), Leases(1, LeaseTimes(1, math.inf), began=boottime()))


async def recorded(journal: Journal) -> list[str]:
    """The deaths that the store has, once nothing is being written."""
    for _ in range(5000):
        await asyncio.sleep(0)
    keys = await journal._store.keys("records/1/death/")
    return [key.rpartition("/")[2] for key in keys]


async def test_every_worker_that_lived_is_told_in_order_and_once():
    deaths = Deaths(journal())
    for worker in ("p-1", "d-1", "d-2"):
        deaths.add_worker(worker)
    await deaths.add_death("d-1")
    await deaths.add_death("d-2")
    assert deaths.untold("p-1") == ("d-1", "d-2")
    deaths.told("p-1", ("d-1",))
    assert deaths.untold("p-1") == ("d-2",)
    deaths.told("p-1", ("d-1", "d-2"))
    assert deaths.untold("p-1") == ()


async def test_who_starts_later_is_not_told_and_who_could_not_be_reached_is():
    deaths = Deaths(journal())
    deaths.add_worker("deaf")
    deaths.add_worker("d-1")
    await deaths.add_death("d-1")
    deaths.add_worker("d-2")
    deaths.add_worker("deaf")  # it is live again
    assert deaths.untold("d-2") == ()
    assert deaths.untold("deaf") == ("d-1",)


async def test_nothing_is_kept_of_what_all_know_or_nobody_is_left_to_hear():
    kept = journal()
    deaths = Deaths(kept)
    deaths.add_worker("p-0")
    for number in range(1000):
        deaths.add_worker(f"d-{number}")
        await deaths.add_death(f"d-{number}")
        assert list(deaths.untold("p-0")) == [f"d-{number}"]
        deaths.told("p-0", deaths.untold("p-0"))
    assert await recorded(kept) == []
    deaths.add_worker("d-1000")
    await deaths.add_death("d-1000")
    assert await recorded(kept) == ["d-1000"]
    await deaths.add_death("p-0")
    assert await recorded(kept) == []
    deaths.told("p-0", ("d-1000",))
