"""Recording what a forward launches, to be launched again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Kernels that were recorded once, with the addresses that they read and write."""

    def replay(self) -> None:
        """Launch them on the current stream."""
        ...


Capture = Callable[[Callable[[], object]], Graph]
"""Records what a function launches. That may run by this, or not."""


class CudaCapture:
    """The `Capture` of a CUDA device; all its graphs share one pool of memory.

    So a graph's results are overwritten when any other is launched. Other threads' calls of CUDA
    go on meanwhile: a transfer agent makes some.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Graph:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph
