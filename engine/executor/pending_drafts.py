"""Drafts that only the device knows while the step that verifies them is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.engine.executor.token_state import UNKNOWN
from kvrelay.model_runner.sampling.prompt_scores import Bring


class PendingDrafts:
    """The drafts of some sequences, which come to the host with the step's results.

    Args:
        ids: ``[N]`` int64 on the device: tokens of the vocabulary, once launched work has run.
        sources: for each sequence, the places of its drafts in `ids`.
    """

    def __init__(self, ids: torch.Tensor, sources: Sequence[Sequence[int]]) -> None:
        self.ids = ids
        self.sources = sources
        self.drafts: list[list[int]] = [[UNKNOWN] * len(own) for own in sources]
        """The drafts of each sequence, `UNKNOWN` until `read`."""
        self._home: torch.Tensor | None = None

    def send_home(self, bring: Bring) -> None:
        """Copy the drafts to the host, by work behind what guesses them."""
        self._home = bring(self.ids)

    def read(self) -> None:
        """Put the tokens into `drafts`, once that work has run."""
        assert self._home is not None, "nothing is on its way"
        ids = self._home.tolist()
        for draft, own in zip(self.drafts, self.sources, strict=True):
            draft[:] = [ids[place] for place in own]
