"""How many threads kernels compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class KernelThreads:
    """How many threads the kernels of a process have at present; its models share one object.

    What a kernel computes is the same, bit for bit, for any number. Only kernels of ours read it,
    torch's own operations do not. One thread runs forwards and calls this.

    Args:
        own: threads that they always have; None: as many as torch has now.
    """

    def __init__(self, own: int | None = None) -> None:
        self.own = torch.get_num_threads() if own is None else own
        """Threads that they always have."""
        self.count = self.own
        """Threads that they have now."""
        self._most = self.own
        self._offer: Callable[[], int] | None = None

    @contextmanager
    def widened(self, offer: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """Let layers have as many threads as `offer` says, but not less than their own.

        Yields a function that tells how many they have had at most so far.
        """
        self._offer, self._most = offer, self.own
        try:
            yield lambda: self._most
        finally:
            self._offer, self.count = None, self.own

    def renew(self) -> None:
        """Ask how many there are, if there may be more than their own; before each layer."""
        if self._offer is not None:
            self.count = max(self._offer(), self.own)
            self._most = max(self._most, self.count)
