"""CUDA graphs without a device: what is captured is recorded, operation by operation.

A replay runs the recorded operations over the very tensors that they had, and writes what each
returns to where its result was. Python is not run again: an array of the host that a captured
function has read stays as it was then, and what a later function computes anew is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """One operation, with its arguments and where its results lie."""

    run: Callable[[], Any]
    results: list[torch.Tensor]

    def again(self) -> None:
        for old, new in zip(self.results, tensors_of(self.run()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """Records while it is on, and is the graph afterwards."""

    current: Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
        result = func(*args, **options)
        self.launches.append(Launch(lambda: func(*args, **options), tensors_of(result)))
        return result

    def replay(self) -> None:
        self.replays += 1
        for one in self.launches:
            one.again()


def capture(work: Callable[[], object]) -> Recording:
    """In place of `CudaCapture`."""
    recording = Recording()
    with recording, recorded(recording):
        work()
    return recording


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    Recording.current = recording
    try:
        yield
    finally:
        Recording.current = None


def kernel(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call what stands for one kernel: it reads its arguments anew whenever a graph is launched."""
    recording = Recording.current
    if recording is None:
        return run()
    with _disable_current_modes():
        result = run()
    recording.launches.append(Launch(run, [result]))
    return result


def launched(run: Callable[P, T]) -> Callable[P, T]:
    """What checks are made of is neither fake nor recorded; what is computed is one kernel."""

    @wraps(run)
    def run_plainly(*args: P.args, **options: P.kwargs) -> T:
        with _disable_current_modes():
            return run(*args, **options)

    return run_plainly
