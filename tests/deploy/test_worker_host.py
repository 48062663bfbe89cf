"""What the actor of a worker answers; its worker is scripted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_host import HostedWorker, WorkerHost
from tests.deploy.test_incarnation import INFO
from tests.deploy.test_placement import CONFIG

EARLIER = "an-earlier-incarnation"


@pytest.fixture
def host() -> WorkerHost:
    """One whose worker has started."""
    host = WorkerHost(CONFIG, cast("Any", None), logging.WARNING)
    host._info, host._worker = INFO, cast("HostedWorker", object())
    return host


async def test_the_last_word_of_another_incarnation_is_not_given_as_this_one_s(host: WorkerHost):
    asked = asyncio.create_task(host.last_word(INFO.incarnation))
    saying = asyncio.create_task(host._say_last_word(WorkerEnd.DRAINED))
    assert await asked is WorkerEnd.DRAINED
    assert await host.last_word(EARLIER) is WorkerEnd.LOST, "nobody knows what became of it"
    await host.last_word_heard(EARLIER)
    assert not host._heard.is_set(), "who asked for this one may not have heard it yet"
    await host.last_word_heard(INFO.incarnation)
    assert host._heard.is_set()
    await saying
