"""The tokens that penalties depend on, counted on the device: the host need not know the latest.

Each request has a row with an entry for each token of the vocabulary::

    bit 0         it is in the prompt
    bits 1 to 31  how often it is in the output

Which request has which row is not known here.
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
"""What one more time adds."""
MOST_BYTES: Final = 256 << 20
"""Device memory of all rows, at most; one row there is in any case."""
_ENTRY: Final = torch.int32


@dataclass(frozen=True, slots=True)
class CountChanges:
    """What changes of the rows, in this order. A *place* is ``row * vocab + token``.

    The arrays stay as they are until the work that reads them has run.
    """

    cleared: Int64Array
    """``[R]`` rows that another request has had."""
    prompt: Int64Array
    """``[N]`` places of tokens in prompts; may have one more than once."""
    output: Int64Array
    """``[M]`` places of tokens in outputs, one for each time."""
    awaited: Int64Array
    """``[2, P]`` the first places of rows, and of the token that each gets the index in what the
    step before samples."""


class TokenCounts:
    """The rows.

    Args:
        rows: of requests; at least 1.
        vocab: tokens.
        device: of the logits.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        assert rows > 0
        self.entries = torch.zeros(rows, vocab, dtype=_ENTRY, device=device)
        """``[rows, vocab]`` int32."""

    @classmethod
    def for_requests(cls, requests: int, vocab: int, device: torch.device) -> TokenCounts:
        """A row for each of so many requests, or as many as `MOST_BYTES` holds."""
        return cls(max(1, min(requests, MOST_BYTES // (vocab * _ENTRY.itemsize))), vocab, device)

    @property
    def num_rows(self) -> int:
        """All of them."""
        return len(self.entries)

    @property
    def vocab(self) -> int:
        """Entries of a row."""
        return self.entries.shape[1]

    def change(self, changes: CountChanges, sampled: torch.Tensor | None) -> None:
        """Make changes, by work on the current stream.

        Args:
            changes: to be made.
            sampled: ``[N]`` int64 token ids on the device, as `CountChanges.awaited` says; None:
                none are awaited.
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
