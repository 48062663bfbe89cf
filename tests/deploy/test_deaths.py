"""What living workers are still to be told, death by death."""

from __future__ import annotations

from kvrelay.deploy.controller.records.deaths import Deaths


def test_every_worker_that_lived_is_told_in_order_and_once():
    deaths = Deaths()
    for worker in ("p-1", "d-1", "d-2"):
        deaths.add_worker(worker)
    deaths.add_death("d-1")
    deaths.add_death("d-2")
    assert deaths.untold("p-1") == ("d-1", "d-2")
    deaths.told("p-1", ("d-1",))
    assert deaths.untold("p-1") == ("d-2",)
    deaths.told("p-1", ("d-1", "d-2"))
    assert deaths.untold("p-1") == ()


def test_who_starts_later_is_not_told_and_who_could_not_be_reached_is():
    deaths = Deaths()
    deaths.add_worker("deaf")
    deaths.add_worker("d-1")
    deaths.add_death("d-1")
    deaths.add_worker("d-2")
    deaths.add_worker("deaf")  # it is live again
    assert deaths.untold("d-2") == ()
    assert deaths.untold("deaf") == ("d-1",)


def test_nothing_is_kept_of_what_all_know_or_nobody_is_left_to_hear():
    deaths = Deaths()
    deaths.add_worker("p-0")
    for number in range(1000):
        deaths.add_worker(f"d-{number}")
        deaths.add_death(f"d-{number}")
        assert len(deaths) == 1
        deaths.told("p-0", deaths.untold("p-0"))
    assert len(deaths) == 0
    deaths.add_worker("d-1000")
    deaths.add_death("d-1000")
    deaths.add_death("p-0")
    assert len(deaths) == 0
    deaths.told("p-0", ("d-1000",))
