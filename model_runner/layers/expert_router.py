"""The choice of experts for each token, and the weights of their results."""

from __future__ import annotations

from functools import reduce

import torch

from kvrelay.model_runner.config.model_config import ExpertScores, MoEConfig
from kvrelay.model_runner.layers.loader import WeightLoader


class ExpertRouter:
    """The choice of experts by `ExpertScores`, in float32.

    DeepSeek-V2 (arXiv 2405.04434) chooses by the softmax; a group is as good as its best expert. V3
    (arXiv 2412.19437) chooses by sigmoids plus a bias. The bias balances the load, and is no part
    of the weights. A group is as good as its two best experts.
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, prefix: str) -> None:
        self._experts = experts
        self._elementwise = loader.elementwise
        names, count = experts.tensors, experts.n_routed_experts
        weight = loader.checkpoint.take(
            f"{prefix}.{names.router}.weight", (count, loader.config.hidden_size), torch.float32
        )
        bias = None
        if names.router_bias is not None:
            name = f"{prefix}.{names.router_bias}"
            bias = loader.checkpoint.take(name, (count,), torch.float32)
        self._linear = loader.linears.make(weight, bias)
        self._score_correction_bias = None
        if experts.scores is ExpertScores.SIGMOID:
            name = f"{prefix}.{names.score_bias}"
            self._score_correction_bias = loader.checkpoint.take(name, (count,), torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, hidden_size]`` to experts and weights, both ``[T, num_experts_per_tok]``."""
        logits = self._linear(x.to(torch.float32))
        if self._experts.scores is ExpertScores.CHOSEN_SOFTMAX:
            best = logits.topk(self._experts.num_experts_per_tok)
            return best.indices, self._elementwise.softmax(best.values)
        if self._score_correction_bias is None:
            scores = preference = self._elementwise.softmax(logits)
        else:
            scores = self._elementwise.sigmoid(logits)
            preference = scores + self._score_correction_bias
        chosen = self._mask_other_groups(preference).topk(self._experts.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        if self._experts.norm_topk_prob:
            weights = weights / (self._elementwise.sum_rows(weights) + 1e-20)
        return chosen, weights * self._experts.routed_scaling_factor

    def _mask_other_groups(self, preference: torch.Tensor) -> torch.Tensor:
        """`preference` with -inf for experts of groups that the token does not go to."""
        experts = self._experts
        if experts.topk_group == experts.n_group:
            return preference
        grouped = preference.view(len(preference), experts.n_group, -1)
        best = reduce(
            torch.add,
            grouped.topk(2 if experts.scores is ExpertScores.SIGMOID else 1).values.unbind(-1),
        )
        kept = best.topk(experts.topk_group).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)
