"""Failed forwards: whether the device can go on after one, and whether one request is to blame."""

from __future__ import annotations

import torch

_BROKEN_DEVICE = ("CUDA error", "Triton Error [CUDA]")
"""Beginnings of the errors after which CUDA refuses everything else in this process. Running out of
memory is not among them."""


class ForwardFailedError(Exception):
    """An error of a whole forward: nothing that it should have written may be used.

    Args:
        reason: why.
        alone: whether it computed only one request, so that either that request or the worker is at
            fault.
        breaks_device: whether no later forward can succeed in this process.
    """

    def __init__(self, reason: str, *, alone: bool, breaks_device: bool = False) -> None:
        super().__init__(reason)
        self.alone = alone
        self.breaks_device = breaks_device

    @classmethod
    def of(
        cls, error: Exception, num_requests: int, *, copied: bool, beside: bool = False
    ) -> ForwardFailedError:
        """Make the failure of a forward with `num_requests` requests from its error.

        If the page copies before it were not made, requests of later steps have wrong pages, too. A
        broken device reports its error at every event. `beside` is whether the device had another
        forward, which may be to blame.
        """
        is_broken = breaks_device(error)
        return cls(
            f"{type(error).__name__}: {error}",
            alone=num_requests == 1 and not (is_broken and beside),
            breaks_device=is_broken or not copied,
        )


class WorkerBrokenError(Exception):
    """An error after which the worker cannot go on: another process takes its place."""


def breaks_device(error: Exception) -> bool:
    """Whether CUDA refuses everything in this process after such an error."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _BROKEN_DEVICE)
    )
