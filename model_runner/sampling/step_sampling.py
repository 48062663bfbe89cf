"""The sampling of one step: launched behind its forward, read once it is on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from kvrelay.model_runner.sampling.device_sampler import Draws
from kvrelay.model_runner.sampling.prompt_scores import Bring
from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow
from kvrelay.model_runner.sampling.verify import DraftedSequence, cut_at_other, rows_of, verify

Draw: TypeAlias = Callable[[torch.Tensor, Sequence[SamplingRow]], Draws]
"""A function that samples each row of logits on its device, such as `device_sampler.launch`."""


class StepSampling(Protocol):
    """The samples of a step's sequences, each of which may bring drafts."""

    def launch(self, logits: torch.Tensor) -> None:
        """Sample. Called by work on the forward's stream; arguments as for `verify`."""
        ...

    @property
    def ids(self) -> torch.Tensor:
        """``[S]`` int64 on the device: each row's token, for work behind `launch`."""
        ...

    def send_home(self, bring: Bring) -> None:
        """Copy the samples of `launch` to the host. Called by work behind it."""
        ...

    def read(self) -> list[list[Sampled]]:
        """Return what `verify` returns, once that work has run."""
        ...


class HostSampling:
    """Sampling on the host: the logits are copied there, and sampled before `launch` returns."""

    def __init__(self, drafted: Sequence[DraftedSequence]) -> None:
        self._drafted = drafted
        self._samples: list[list[Sampled]] = []

    @property
    def ids(self) -> torch.Tensor:
        """Raise: the device does not know the tokens that the host samples."""
        raise AssertionError("tokens that the host samples are not on the device")

    def launch(self, logits: torch.Tensor) -> None:
        """See `StepSampling`."""
        self._samples = verify(logits, self._drafted)

    def send_home(self, bring: Bring) -> None:
        """See `StepSampling`."""

    def read(self) -> list[list[Sampled]]:
        """See `StepSampling`."""
        return self._samples


class DeviceSampling:
    """Sampling on the device; token ids and the log-probabilities asked for leave it.

    Args:
        draw: samples rows.
        drafted: the sequences.
    """

    def __init__(self, draw: Draw, drafted: Sequence[DraftedSequence]) -> None:
        self._draw = draw
        self._drafted = drafted
        # Kept until the copies have arrived: unreferenced memory would be reused.
        self._draws: Draws | None = None
        self._home: Draws | None = None

    @property
    def ids(self) -> torch.Tensor:
        """See `StepSampling`."""
        assert self._draws is not None, "nothing was sampled"
        return self._draws.ids

    def launch(self, logits: torch.Tensor) -> None:
        """See `StepSampling`."""
        if self._drafted:
            self._draws = self._draw(logits, rows_of(self._drafted))

    def send_home(self, bring: Bring) -> None:
        """See `StepSampling`."""
        if self._draws is not None:
            self._home = self._draws.moved(bring)

    def read(self) -> list[list[Sampled]]:
        """See `StepSampling`."""
        if not self._drafted:
            return []
        assert self._home is not None, "nothing is on its way"
        return cut_at_other(self._home.read(), self._drafted)
