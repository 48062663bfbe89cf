"""The choice of steps that are CUDA graphs. Supervising processes read it: no torch here."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvrelay.model_runner.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

_MOST: Final = 512
"""The sequences of the largest graph, unless sizes are given."""
MOST_DRAFTED_ROWS: Final = 512
"""The most tokens of a step with drafts that is a graph.

A GPU takes longer for more of them than the host takes to launch their kernels.
"""


class CudaGraphs(StrEnum):
    """The values of ``--cuda-graphs``."""

    AUTO = "auto"
    """Graphs as of `DECODE` on a GPU where they can be captured, else none."""
    OFF = "off"
    """Every kernel is launched by itself."""
    DECODE = "decode"
    """Steps in which each sequence brings one token, or drafts, are launched as one graph."""


class GraphSizes:
    """The numbers of sequences that graphs are captured for.

    Args:
        sizes: ascending, none twice, at least 1.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        assert sizes == tuple(sorted(set(sizes)))
        assert sizes
        assert sizes[0] >= 1
        self.sizes = sizes

    @classmethod
    def parse(cls, text: str) -> GraphSizes:
        """Read numbers with commas between them. Raise ValueError for anything else."""
        try:
            sizes = {int(one) for one in text.split(",")}
        except ValueError:
            raise ValueError(f"must be numbers with commas between them, got {text!r}") from None
        if min(sizes) < 1:
            raise ValueError(f"must be at least 1 each, got {text!r}")
        return cls(tuple(sorted(sizes)))

    @classmethod
    def up_to(cls, most: int) -> GraphSizes:
        """The sizes of vLLM (1, 2, 4, by 8 to 256, by 16 to 512) up to the first from `most` on."""
        usual = (1, 2, 4, *range(8, 257, 8), *range(272, _MOST + 1, 16))
        last = bisect_left(usual, most)
        return cls(usual[: last + 1])

    def below(self, most: int) -> GraphSizes:
        """The sizes that steps of up to `most` sequences take."""
        return GraphSizes(self.sizes[: bisect_left(self.sizes, most) + 1])

    @property
    def largest(self) -> int:
        """The most sequences of a graph: larger steps are not graphs."""
        return self.sizes[-1]

    def of(self, count: int) -> int | None:
        """The smallest size that `count` sequences fit into; None if they fit into none."""
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if count > 0 and place < len(self.sizes) else None


class GraphShape(NamedTuple):
    """The steps of one graph, to which others are padded."""

    size: int
    """The number of sequences."""
    each: int
    """The number of tokens that each sequence brings."""

    @property
    def rows(self) -> int:
        """The tokens of a step."""
        return self.size * self.each


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """The graphs that a model gets, and their pools: their memory is allocated before pools are."""

    sizes: GraphSizes
    page_size: int
    """Tokens a page of the pools that there will be."""
    required: bool = True
    """Whether a model is refused that can have no graphs; else it runs without, and says why."""
    most_each: int = 1
    """The most tokens of a sequence in a step that does not compute prompts: 1 and its drafts."""


@dataclass(frozen=True, slots=True)
class GraphRoom:
    """The limits of the steps that graphs are captured for."""

    sizes: GraphSizes
    max_tokens: int
    """The most tokens of a sequence."""
    required: bool = True
    """See `GraphOptions`."""
    most_each: int = 1
    """The most tokens that a sequence brings."""

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """The graphs: one of decode for each size, and for the smaller ones one of drafts."""
        sizes = self.sizes.sizes
        shapes = [GraphShape(size, 1) for size in sizes]
        if self.most_each > 1:
            drafted = (GraphShape(size, self.most_each) for size in sizes)
            shapes += [one for one in drafted if one.rows <= MOST_DRAFTED_ROWS]
        return tuple(shapes)

    @property
    def most_rows(self) -> int:
        """The most tokens of a step."""
        return max(shape.rows for shape in self.shapes)

    def shape_of(self, count: int, each: int) -> GraphShape | None:
        """The smallest graph for `count` sequences of up to `each` tokens; None: there is none."""
        size = self.sizes.of(count)
        if size is None or each > self.most_each:
            return None
        shape = GraphShape(size, 1 if each == 1 else self.most_each)
        return shape if each == 1 or shape.rows <= MOST_DRAFTED_ROWS else None


def do_without_graphs(lack: str, *, required: bool = False) -> None:
    """Say in the log that a model has no graphs, and what it lacks for them.

    Raises:
        UnsupportedOptionError: they are required.
    """
    if required:
        raise UnsupportedOptionError(f"--cuda-graphs decode: {lack}")
    logger.warning("steps of decode are launched kernel by kernel: CUDA graphs: %s", lack)
