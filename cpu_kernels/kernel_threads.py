"""The number of threads that kernels compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class KernelThreads:
    """The number of threads of a process's kernels at present; its models share one object.

    A kernel's results are the same, bit for bit, for any number. Only our kernels read it, torch's
    own operations do not. One thread runs forwards and calls this.

    Args:
        own: the threads that kernels always have; None: as many as torch has now.
    """

    def __init__(self, own: int | None = None) -> None:
        self.own = torch.get_num_threads() if own is None else own
        """The threads that kernels always have."""
        self.count = self.own
        """The threads that kernels have now."""
        self._most = self.own
        self._offer: Callable[[], int] | None = None

    @contextmanager
    def widened(self, offer: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """Give layers as many threads as `offer` returns, but at least their own.

        Yield a function that returns the most threads that layers have had so far.
        """
        self._offer, self._most = offer, self.own
        try:
            yield lambda: self._most
        finally:
            self._offer, self.count = None, self.own

    def renew(self) -> None:
        """Update the number of threads, if more than their own may be had; before each layer."""
        if self._offer is not None:
            self.count = max(self._offer(), self.own)
            self._most = max(self._most, self.count)
