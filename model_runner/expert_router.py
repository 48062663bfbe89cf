"""Which experts a token goes to."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvrelay.model_runner.loader import Loader
from kvrelay.model_runner.model_config import ExpertsConfig


class ExpertRouter:
    """DeepSeek's choice of experts, in float32.

    V2 (arXiv 2405.04434) chooses by the softmax; a group is as good as its best
    expert. V3 (arXiv 2412.19437) chooses by sigmoids plus a bias that balances
    the load but does not weigh; a group is as good as its two best.
    """

    def __init__(self, loader: Loader, experts: ExpertsConfig, prefix: str) -> None:
        shape = (experts.count, loader.config.hidden_size)
        self._experts = experts
        self._weight = loader.checkpoint.take(f"{prefix}.weight", shape).to(torch.float32)
        self._balance = None
        if experts.balanced:
            name = f"{prefix}.e_score_correction_bias"
            self._balance = loader.checkpoint.take(name, (experts.count,), torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, hidden_size]`` to ``[T, per_token]`` experts and their float32 weights."""
        logits = functional.linear(x.to(torch.float32), self._weight)
        if self._balance is None:
            scores = preference = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            preference = scores + self._balance
        chosen = self._within_best_groups(preference).topk(self._experts.per_token).indices
        weights = scores.gather(1, chosen)
        if self._experts.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self._experts.scaling

    def _within_best_groups(self, preference: torch.Tensor) -> torch.Tensor:
        """`preference` with -inf for experts of groups that the token does not go to."""
        experts = self._experts
        if experts.best_groups == experts.groups:
            return preference
        grouped = preference.view(len(preference), experts.groups, -1)
        best = grouped.topk(2 if experts.balanced else 1).values.sum(-1)
        kept = best.topk(experts.best_groups).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)
