"""What reaches the engine thread from outside."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.engine.outputs import RequestKey, RouterLink
from kvrelay.engine.stop import StopConditions
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.model_runner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker, in one of its lives."""

    address: str
    incarnation: str


class Dropped(StrEnum):
    """What a message that was dropped had been; of an older attempt, or of another worker."""

    SUBMIT = "submit"
    """Came twice."""
    CANCEL = "cancel"
    """Of what has ended already, or never was."""
    HAND_OVER = "hand_over"
    """Of a request that has ended here."""
    DUPLICATE = "duplicate"
    """A word of a hand-over, or the end of a read, that came twice."""
    STREAM = "stream"
    """A second one for a request."""
    INCARNATION = "incarnation"
    """Meant another life of this worker."""


@dataclass(frozen=True, slots=True)
class Misdirected:
    """A call meant another life of this worker; it was refused."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A router's stream has opened."""

    link: RouterLink


@dataclass(frozen=True, slots=True)
class Detach:
    """A router's stream has ended: so do its requests here."""

    link: RouterLink


@dataclass(frozen=True, slots=True)
class Submit:
    """A new attempt at a request."""

    link: RouterLink
    key: RequestKey
    input_ids: tuple[int, ...]
    """The prompt, and what an earlier attempt has emitted."""
    prompt_len: int
    """Of `input_ids`, the prompt."""
    sampling: SamplingParams
    stops: StopConditions
    choices: tuple[int, ...] = (0,)
    """The outputs of the one prompt that are wanted; one, if any was emitted before."""
    prompt_logprobs: int | None = None
    speculate: bool = True
    priority: int = 0
    arrived: float = field(default_factory=time.monotonic)
    """When a router took it, by this worker's clock."""
    prefill: Peer | None = None
    """To a decode worker: who computes the prompt."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, all choices of it. Unknown keys are ignored: it may just have ended."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The process of another worker is confirmed to be gone."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing but a reason to look again, such as a fence that has passed."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Shows the ledger between two steps: also a sign of life of the loop itself."""

    look: Callable[[Ledger], object]
    """Called on the engine thread; changes nothing."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests: what still comes is retracted. Those that are here go on."""

    on_drained: Callable[[], object]
    """Called once, on the engine thread: no request is left, and no forward runs."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Of a worker that drains: retract what can go on elsewhere."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine's loop."""


class Inbox:
    """Many threads post, the engine thread drains."""

    def __init__(self) -> None:
        self._messages: deque[object] = deque()
        self._posted = threading.Condition()

    def post(self, message: object) -> None:
        """Add a message; any thread."""
        with self._posted:
            self._messages.append(message)
            self._posted.notify()

    def drain(self) -> list[object]:
        """Wait for a message; every one so far, in order."""
        with self._posted:
            while not self._messages:
                self._posted.wait()
            messages = list(self._messages)
            self._messages.clear()
            return messages
