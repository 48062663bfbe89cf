"""The hand-over of one request's KV, as two state machines without any I/O.

Each side takes the other's messages and returns its own; the workers carry
them. The stream between them is the lease: the prefill side keeps what it has
announced untouched exactly while the stream lives.

::

    prefill side                                decode side
    QUEUED     --- Ask ------------------------>  OPEN -> ASKED
    ASKED      <-- Held ------------------------  ASKED     (waits for another request)
    ASKED      <-- Grant -----------------------  GRANTED   (whole prompt reserved)
    LOADING                                               (reads the history, if there is one)
    LOADED     --- Done (sums of pages) ------->  GRANTED   (has held it all along)
    GRANTED    <-- Released(valid) -------------  GRANTED
    GRANTED    --- Begun ---------------------->  GRANTED   (the first chunk is computed)
    GRANTED    --- Announce (pages of a chunk) >  GRANTED   (reads them)
    ANNOUNCED  --- Announce (.., first token) ->  ANNOUNCED (reads the rest)
               <-- Done (sums of pages) --------  READ      (every read ended well)
    VERIFYING                                               (only if there are sums)
    RELEASED   --- Released(valid) ------------>  VALID     (may be activated)

The history is what the decode side has of a prompt and the prefill side lacks: of a session, or in
its prefix index (`docs/architecture/sessions.md`). The grant lends it, and the hand-over goes the
other way first, with the same messages.

`Held` comes only if the grant has to wait for the prefix of another request, `Begun` only if
nothing was announced before.

Either side may leave at any point: the prefill side by `Ended`, the decode
side by closing the stream.

The tables say which step each side can take from which state, and where it
leads. Every other step is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, TypeVar

from kvrelay.kv_transfer.errors import ProtocolError


class PrefillState(Enum):
    """The state of the prefill side."""

    QUEUED = auto()
    """The request waits for its turn."""
    ASKED = auto()
    """The request waits for the decode side's memory."""
    GRANTED = auto()
    """The request may compute and announce."""
    LOADING = auto()
    """A read of the decode side's part of the prompt is running."""
    LOADED = auto()
    """The read has ended; the verdict is awaited."""
    ANNOUNCED = auto()
    """All pages are announced; the decode side reads."""
    VERIFYING = auto()
    """The decode side has read; checksums are compared."""
    RELEASED = auto()
    """The decode side needs nothing more from here."""
    ENDED = auto()
    """The prefill side has left early."""


PREFILL_STEPS: Final = {
    "ask": {PrefillState.QUEUED: PrefillState.ASKED},
    "held": {PrefillState.ASKED: PrefillState.ASKED},
    "grant": {PrefillState.ASKED: PrefillState.GRANTED},
    "load": {PrefillState.GRANTED: PrefillState.LOADING},
    "loaded": {PrefillState.LOADING: PrefillState.LOADED},
    "load_released": {PrefillState.LOADED: PrefillState.GRANTED},
    "load_released_as_invalid": {PrefillState.LOADED: PrefillState.LOADED},
    "begin": {PrefillState.GRANTED: PrefillState.GRANTED},
    "announce": {PrefillState.GRANTED: PrefillState.GRANTED},
    "announce_last": {PrefillState.GRANTED: PrefillState.ANNOUNCED},
    "done": {PrefillState.ANNOUNCED: PrefillState.RELEASED},
    "done_with_sums": {PrefillState.ANNOUNCED: PrefillState.VERIFYING},
    "verified": {PrefillState.VERIFYING: PrefillState.RELEASED},
    "end": dict.fromkeys(
        set(PrefillState) - {PrefillState.RELEASED, PrefillState.ENDED}, PrefillState.ENDED
    ),
}


class DecodeState(Enum):
    """The state of the decode side."""

    OPEN = auto()
    """The request waits for the prefill side's turn."""
    ASKED = auto()
    """The prefill side has asked to reserve the prompt."""
    GRANTED = auto()
    """The prompt is reserved; announced pages are read."""
    ANNOUNCED = auto()
    """All pages are announced; reads are running."""
    READ = auto()
    """Every read ended well; the verdict is awaited."""
    VALID = auto()
    """The pages are known to be right."""


DECODE_STEPS: Final = {
    "ask": {DecodeState.OPEN: DecodeState.ASKED},
    "hold": {DecodeState.ASKED: DecodeState.ASKED},
    "grant": {DecodeState.ASKED: DecodeState.GRANTED},
    "loaded": {DecodeState.GRANTED: DecodeState.GRANTED},
    "begun": {DecodeState.GRANTED: DecodeState.GRANTED},
    "announce": {DecodeState.GRANTED: DecodeState.GRANTED},
    "announce_last": {DecodeState.GRANTED: DecodeState.ANNOUNCED},
    "done": {DecodeState.ANNOUNCED: DecodeState.READ},
    "released": {DecodeState.READ: DecodeState.VALID},
    "released_as_invalid": {DecodeState.READ: DecodeState.READ},
}

StateT = TypeVar("StateT", PrefillState, DecodeState)


def next_state(steps: Mapping[str, Mapping[StateT, StateT]], step: str, state: StateT) -> StateT:
    """Find the state that a step of a table leads to from `state`.

    Raises:
        ProtocolError: the step cannot be taken from there.
    """
    target = steps[step].get(state)
    if target is None:
        raise ProtocolError(f"{step} while {state.name}")
    return target
