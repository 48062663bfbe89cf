"""Attention with sinks by kernels that know of none, but return sums of exponentials."""

from __future__ import annotations

import torch


def tokens_share(log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The part of a softmax that tokens have beside a sink, by which results are multiplied.

    Args:
        log_sums: ``[T, heads]`` float32, the logarithms of the sums of tokens' exponentials.
        sinks: ``[heads]`` float32.

    Returns:
        ``[T, heads, 1]``
    """
    return torch.sigmoid(log_sums - sinks)[..., None]
