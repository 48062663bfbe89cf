"""Hashes of loaded models: of every byte, because another model may differ in one tensor only.

Weights are hashed where they lie, on a CPU or a GPU, at about the speed of their memory. A
cryptographic hash would take longer than the disk, and a sample could miss a change. The hash is
against mistakes, not attacks: an attacker who can write checkpoints needs no collision.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Final

import torch

_BLOCK_WORDS: Final = 1 << 15
"""Words of 64 bits that share a sum: 256 KiB, which stay in a CPU's cache."""
_BLOCKS_AT_ONCE: Final = {"cpu": 1, "cuda": 256}
_LOWER_HALF: Final = 0xFFFF_FFFF


class WeightsDigest:
    """A hash over tensors by name, in whatever order they come."""

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash a tensor as it is now; a name that comes again is hashed again."""
        self._tensors[name] = tensor_digest(tensor)

    def note(self, name: str, value: object) -> None:
        """Hash what is known of a tensor beside its bytes, by the `repr`."""
        self._tensors[name] = object_digest(value)

    def hexdigest(self) -> str:
        """The hash of all tensors that were added."""
        lines = [f"{name} {digest}\n" for name, digest in sorted(self._tensors.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def object_digest(value: object) -> str:
    """The hash of dataclasses, enums, numbers and strings, by their `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """The hash of a tensor's type, shape and bytes; the same on every device.

    Each block has a sum of all its words, with odd weights, so a change of one word always changes
    it. A word's upper half is first folded into its lower one. Otherwise an odd weight would keep
    the highest bit, and changes of it in two words would cancel out.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    sums = _block_sums(data[:whole].view(torch.int64))
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(sums.cpu().numpy().tobytes())
    digest.update(data[whole:].cpu().numpy().tobytes())
    return digest.hexdigest()


def _block_sums(words: torch.Tensor) -> torch.Tensor:
    """``[B]`` int64: the sum of each block of `words`; the last block may be shorter."""
    weights = _weights(words.device)
    whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    blocks, rest = words[:whole].view(-1, _BLOCK_WORDS), words[whole:].view(1, -1)
    step = _BLOCKS_AT_ONCE.get(words.device.type, 1)
    sums = [
        _weighted_sums(blocks[first : first + step], weights)
        for first in range(0, len(blocks), step)
    ]
    return torch.cat([*sums, _weighted_sums(rest, weights[: rest.shape[1]])])


def _weighted_sums(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    folded = blocks >> 32
    folded &= _LOWER_HALF  # the shift brought the sign along
    folded ^= blocks
    folded *= weights
    return folded.sum(1)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """``[_BLOCK_WORDS]`` odd numbers that look random, and are the same everywhere."""
    drawn = bytearray(hashlib.shake_256(b"kvrelay").digest(8 * _BLOCK_WORDS))
    return (torch.frombuffer(drawn, dtype=torch.int64) | 1).to(device)
