"""Files of tests that a worker of xdist reads when their turn comes.

Else each worker would import all files and make all of their tests, though it runs a third of them.
To xdist, which gives workers the same list, a file is one test. A plugin of pytest.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from xdist.scheduler import LoadFileScheduling


class FileInTurn(pytest.File):
    """A file of tests, not read yet."""

    def collect(self) -> Iterator[Turn]:
        yield Turn.from_parent(self, name="all")


class Turn(pytest.Item):
    """The tests of a file, to be run one after the other."""

    def runtest(self) -> NoReturn:
        raise AssertionError("its tests are run in its place")

    def run(self, nextitem: pytest.Item | None) -> None:
        """Collect the tests, choose among them as pytest does, and run them.

        Args:
            nextitem: what comes afterwards, by which pytest tells which fixtures to keep.
        """
        session, place = self.session, self.session.items.index(self)
        tests = self._collect_tests()
        if not tests:  # what the file before has kept for this one ends
            session._setupstate.teardown_exact(nextitem)
        try:
            for item, following in pairwise([*tests, nextitem]):
                assert item is not None
                session.items[place] = item  # whose reports xdist expects
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    return
        finally:
            session.items[place] = self

    def _collect_tests(self) -> list[pytest.Item]:
        assert self.parent is not None
        gc.disable()  # a third of the time, and what is made stays
        try:
            module = pytest.Module.from_parent(self.parent.parent, path=self.path)
            items = [*self.session.genitems(module)]
            self.config.hook.pytest_collection_modifyitems(
                session=self.session, config=self.config, items=items
            )
        finally:
            gc.enable()
        return items


class FilesInTurn(LoadFileScheduling):
    """A worker runs one file and knows of the next."""

    def _reschedule(self, node: Any) -> None:
        """Give out no more files than that, or others may have none at the end."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the file in which a worker has died; it is not run again."""
        units = self.assigned_work[node]
        died_in = next(
            ((unit, name) for unit in units.values() for name, done in unit.items() if not done),
            None,
        )
        if died_in is not None:
            unit, name = died_in
            unit[name] = True
        for scope in [scope for scope, unit in units.items() if all(unit.values())]:
            del units[scope]
        super().remove_node(node)
        return None if died_in is None else died_in[1]


def reads_in_turn(config: pytest.Config) -> bool:
    """Whether this is a worker of xdist's that is to run files, and no test by its name."""
    by_name = config.option.keyword or config.getoption("lf", False)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return is_worker and not by_name and not any("::" in arg for arg in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> FileInTurn | None:
    if not reads_in_turn(parent.config):
        return None
    file: FileInTurn = FileInTurn.from_parent(parent, path=module_path)
    return file


_TURNS = pytest.StashKey[list[pytest.Item]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hide files that are not read yet from the choice by markers, which they have none of."""
    config.stash[_TURNS] = [item for item in items if isinstance(item, Turn)]
    items[:] = [item for item in items if not isinstance(item, Turn)]


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_show_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [*config.stash[_TURNS], *items]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, Turn):
        return None
    item.run(nextitem)
    return True


@pytest.hookimpl(optionalhook=True, trylast=True)  # pytest may run without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesInTurn | None:
    return FilesInTurn(config, log) if config.option.dist == "loadfile" else None
