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
    """The request; its choice is the first one's, as the stream is for all of them."""
    prefill_incarnation: str
    """The prefill worker that is meant; another one at its address refuses."""
    decode_incarnation: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for memory: the request is next to run, so its whole prompt is to be reserved."""

    known_tokens: int = 0
    """Tokens at the prompt's beginning that the prefill side has: it would not read them."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one pool that follow each other in a request's page table."""

    first_page: int
    page_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The index after the last page."""
        return self.first_page + len(self.page_ids)

    def since(self, page: int) -> PageRun:
        """The run without the pages before `page`."""
        cut = min(max(0, page - self.first_page), len(self.page_ids))
        return PageRun(self.first_page + cut, self.page_ids[cut:])


@dataclass(frozen=True, slots=True)
class History:
    """KV of a prompt that the decode side has, and that the prefill side may read."""

    runs: tuple[PageRun, ...]
    """Whole pages whose KV has settled, from the prompt's first page on; one run for each pool."""
    agent: AgentDescription
    """The description of the memory that they are read from."""
    bytes_per_second: float
    """The speed at which the decode side has written to the prefill side; 0: not measured."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to `Ask`: memory for the whole prompt is reserved."""

    history: History | None = None
    reads_host: bool = False
    """Pages of the prefill side's host may be announced."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one output of the prompt."""

    token_id: int
    finished: bool = False
    """The token is all of that output; the prefill side has told the router so."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Pages that are written, a run for each pool.

    A window pool's pages come with the last announcement: those that the window then holds.
    """

    runs: tuple[PageRun, ...]
    first_tokens: tuple[FirstToken, ...] = ()
    """The first token of every output that is wanted, in order; only on the last announcement."""
    from_host: bool = False
    """The pages lie in the prefill side's host pool; they were computed for an earlier request."""


class PagePlace(NamedTuple):
    """A page's place in its request; each side has the page elsewhere in its pools."""

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
        """The place of the page."""
        return PagePlace(self.pool, self.page)


@dataclass(frozen=True, slots=True)
class Done:
    """All reads have ended well.

    From the decode side: every announced page was read. From the prefill side: all that it needs of
    the history was read.
    """

    sums: tuple[PageSum, ...] = ()
    """The checksums of what was read, to be compared with those of what was announced."""


@dataclass(frozen=True, slots=True)
class Released:
    """The answer to `Done`: whether the pages were held all along, and have the same checksums."""

    valid: bool
    mismatches: int = 0
    """The number of pages whose sums differ; if there are any, `valid` is false."""


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
    """A sign that its sender is alive. It carries the number of the message before it."""


FromDecode = Grant | Done | Heartbeat | Held | Released
FromPrefill = Ask | Announce | Released | Ended | Heartbeat | Begun | Done
MessageT_co = TypeVar("MessageT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Sequenced(Generic[MessageT_co]):
    """A message with its place among those of its side."""

    number: int
    """The message's number, from 1 on; a `Heartbeat` has that of the message before it."""
    message: MessageT_co
