"""Files of tests that a worker of xdist reads when their turn comes.

Else each worker would import all files and make all of their tests, though it runs a third of them.
To xdist, which gives workers the same list, a file is one test.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

import pytest


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
        try:
            for item, following in pairwise([*self._collect_tests(), nextitem]):
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
