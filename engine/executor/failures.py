"""Forwards that fail: what they have computed, and whether the device can go on."""

from __future__ import annotations

import torch

_BROKEN_DEVICE = ("CUDA error", "Triton Error [CUDA]")
"""What errors say after which CUDA refuses everything else in this process. Being out of
memory is none of them."""


class ForwardFailedError(Exception):
    """A forward has failed as a whole: nothing that it should have written may be used.

    Args:
        reason: why.
        alone: it computed one request alone, so that it is that request or the worker.
        breaks_device: no forward after it can succeed in this process.
    """

    def __init__(self, reason: str, *, alone: bool, breaks_device: bool = False) -> None:
        super().__init__(reason)
        self.alone = alone
        self.breaks_device = breaks_device

    @classmethod
    def of(
        cls, error: Exception, num_requests: int, *, copied: bool, beside: bool = False
    ) -> ForwardFailedError:
        """What an error of a forward that computed so many requests means.

        Without the page copies before it, requests of later steps have wrong pages, too. A device
        that is broken says so at every event: `beside` is whether it had another forward, which
        may be to blame.
        """
        is_broken = breaks_device(error)
        return cls(
            f"{type(error).__name__}: {error}",
            alone=num_requests == 1 and not (is_broken and beside),
            breaks_device=is_broken or not copied,
        )


class WorkerBrokenError(Exception):
    """The worker cannot go on: its process is to end, and another one to take its place."""


def breaks_device(error: Exception) -> bool:
    """Whether CUDA refuses everything in this process after such an error."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _BROKEN_DEVICE)
    )
