"""The messages of a hand-over, which moves one request's KV from a prefill to a decode worker.

`kvrelay.kv_transfer.hand_over.states` says in which order they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.submit import RequestKey


class HandOverEnd(StrEnum):
    """Why the prefill side will announce nothing more."""

    FINISHED = "finished"
    """The first token completed the request."""
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Open:
    """The first message of a stream, from the decode side: which request it is for."""

    key: RequestKey
    """Its choice is the first one's: the stream is for all of them."""
    prefill_incarnation: str
    """The worker that is meant; another one at its address refuses."""
    decode_incarnation: str


@dataclass(frozen=True, slots=True)
class Ask:
    """The request is next to run: reserve its whole prompt."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one pool that follow each other in a request's page table."""

    first_page: int
    page_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.first_page + len(self.page_ids)

    def since(self, page: int) -> PageRun:
        """What is left of it without the pages before `page`."""
        cut = min(max(0, page - self.first_page), len(self.page_ids))
        return PageRun(self.first_page + cut, self.page_ids[cut:])


@dataclass(frozen=True, slots=True)
class History:
    """What the decode side has of a session's turn: it may be read from there."""

    runs: tuple[PageRun, ...]
    """Whole pages whose KV has settled, from the prompt's first on; a run for each pool."""
    agent: AgentDescription
    """How they are read."""
    bytes_per_second: float
    """At which the decode side has written to the prefill side; 0: not measured."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The whole prompt is reserved."""

    history: History | None = None
    reads_host: bool = False
    """Pages of the prefill side's host may be announced."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What one output of the prompt begins with."""

    token_id: int
    finished: bool = False
    """It is all of that output; the prefill side has said so to the router."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Pages that are written, a run for each pool.

    Those of a window pool come with the last announcement: the ones that the
    window then holds.
    """

    runs: tuple[PageRun, ...]
    first_tokens: tuple[FirstToken, ...] = ()
    """Of every output that is wanted, in order; only on the last announcement."""
    from_host: bool = False
    """The pages lie in the prefill side's host pool; they were computed for an earlier request."""


class PagePlace(NamedTuple):
    """A page of a request: both sides have it elsewhere in their pools."""

    pool: int
    page: int
    """Its index in the request's page table."""


@dataclass(frozen=True, slots=True)
class PageSum:
    """The checksum of the written tokens of one page, over all of its layers."""

    pool: int
    page: int
    """Its index in the request's page table."""
    value: int

    @property
    def place(self) -> PagePlace:
        """The page that it is the checksum of."""
        return PagePlace(self.pool, self.page)


@dataclass(frozen=True, slots=True)
class Done:
    """Every announced page was read; from the prefill side: all that it needs of the history."""

    sums: tuple[PageSum, ...] = ()
    """Of what was read: to be compared with what was announced."""


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to `Done`: whether the pages were held all along, and are the same."""

    valid: bool
    mismatches: int = 0
    """Pages whose sums differ; not valid, if there are any."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended on the prefill side."""

    reason: HandOverEnd
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """The grant comes later: the decode side reads a part of the prompt for another request."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt's first chunk is being computed, and nothing was announced yet."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Shows that its sender is alive. It carries the number of the message before it."""


FromDecode = Grant | Done | Heartbeat | Held | Released
FromPrefill = Ask | Announce | Released | Ended | Heartbeat | Begun | Done
MessageT_co = TypeVar("MessageT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Sequenced(Generic[MessageT_co]):
    """A message with its place among those of its side."""

    number: int
    """From 1 on; of a `Heartbeat` that of the message before."""
    message: MessageT_co
