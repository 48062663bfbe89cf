"""Recording what a forward launches, to be launched again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Kernels that were recorded once, with the addresses that they read and write."""

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        ...


Capture = Callable[[Callable[[], object]], Graph]
"""A recorder of what a function launches. Recording may run the launched work, or not."""


class CudaCapture:
    """The `Capture` of a CUDA device; all its graphs share one pool of memory.

    So a graph's results are overwritten when any other graph is launched. Other threads may call
    CUDA meanwhile, as a transfer agent does.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Graph:
        """Record what `work` launches; see `Capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph
