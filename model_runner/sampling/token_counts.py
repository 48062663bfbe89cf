"""The counts of tokens for penalties, kept on the device: the host need not know the latest one.

Each request has a row with an entry for each token of the vocabulary::

    bit 0         it is in the prompt
    bits 1 to 31  how often it is in the output

The caller assigns rows to requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.torch_options import to_device

IN_PROMPT: Final = 1
IN_OUTPUT: Final = 2
"""The addend for one more time in the output."""
MOST_BYTES: Final = 256 << 20
"""The most device memory of all rows; one row exists in any case."""
_ENTRY: Final = torch.int32


@dataclass(frozen=True, slots=True)
class CountChanges:
    """The changes of the rows, made in this order. A *place* is ``row * vocab + token``.

    The arrays stay as they are until the work that reads them has run.
    """

    cleared: Int64Array
    """``[R]`` rows to clear, as another request has had them."""
    prompt: Int64Array
    """``[N]`` places of tokens in prompts; a place may come more than once."""
    output: Int64Array
    """``[M]`` places of tokens in outputs, one for each time."""
    awaited: Int64Array
    """``[2, P]`` tokens that the step before samples: first places of rows, and indices.

    The index is that of the row's new token among the step's samples.
    """


class TokenCounts:
    """The rows of counts.

    Args:
        rows: the number of rows, at least 1.
        vocab: the tokens of the vocabulary.
        device: the logits' device.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        assert rows > 0
        self.entries = torch.zeros(rows, vocab, dtype=_ENTRY, device=device)
        """``[rows, vocab]`` int32."""

    @classmethod
    def for_requests(cls, requests: int, vocab: int, device: torch.device) -> TokenCounts:
        """Make a row for each of `requests`, or as many rows as `MOST_BYTES` holds."""
        return cls(max(1, min(requests, MOST_BYTES // (vocab * _ENTRY.itemsize))), vocab, device)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.entries)

    @property
    def vocab(self) -> int:
        """The entries of a row."""
        return self.entries.shape[1]

    def change(self, changes: CountChanges, sampled: torch.Tensor | None) -> None:
        """Make changes, by work on the current stream.

        Args:
            changes: the changes.
            sampled: ``[N]`` int64 token ids on the device, to which `CountChanges.awaited` refers;
                None: none are awaited.
        """
        device, flat = self.entries.device, self.entries.view(-1)
        if changes.cleared.size:
            self.entries.index_fill_(0, to_device(changes.cleared, device), 0)
        if changes.prompt.size:
            flat.index_fill_(0, to_device(changes.prompt, device), IN_PROMPT)
        if changes.output.size:
            self._count(to_device(changes.output, device))
        if changes.awaited.size:
            assert sampled is not None
            first, index = to_device(changes.awaited, device)
            self._count(first + sampled[index])

    def _count(self, places: torch.Tensor) -> None:
        ones = torch.full(places.shape, IN_OUTPUT, dtype=_ENTRY, device=places.device)
        self.entries.view(-1).index_add_(0, places, ones)


def places_of(row: int, vocab: int, token_ids: list[int]) -> Int64Array:
    """The places of tokens in a row."""
    return np.array(token_ids, np.int64) + row * vocab
