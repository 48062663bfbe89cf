"""A device that works as late as its events allow, and in any order that they allow.

What is launched lies in queues. An adversary runs it, one piece at a time, from a random queue:
when the simulation lets it, or when the host waits for an event. Staging that is used again is
spoilt first. So who uses memory before the event that frees it finds, or leaves, something else.
A device's tensor that is copied to the host must be referred to until the event behind the copy.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.device.device_streams import (
    DeviceEvent,
    DeviceStream,
    PinnedSet,
    PinnedStaging,
    Staging,
)
from kvrelay.model_runner.sampling.device_sampler import Draws, Scores
from kvrelay.model_runner.sampling.sampler import (
    Float32Array,
    SamplingRow,
    edit_logits,
    sample_token_id,
    topk_indices,
)
from kvrelay.model_runner.sampling.token_counts import IN_OUTPUT, IN_PROMPT

SPOILT = 0xA5
"""A byte that staging is filled with; no token, place or page is made of it."""


class DeviceError(Exception):
    """Work raises it that fails on the device: the host hears of it at every event from then on."""


class LateEvent:
    """An `DeviceEvent` that passes when the adversary comes to it."""

    def __init__(self, device: LateStreams) -> None:
        self._device = device
        self.has_passed = False

    def passed(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        self._device.waits += not self.has_passed
        self._device.run_until(self)
        if self._device.error is not None:  # also of what fails behind it
            raise RuntimeError(f"CUDA error: {self._device.error}")


@dataclass
class Barrier:
    """Nothing behind it runs before its event."""

    event: LateEvent


class LateStream:
    """A `DeviceStream` whose work waits to be run."""

    def __init__(self, device: LateStreams) -> None:
        self._device = device
        self.queue: deque[Callable[[], object] | LateEvent | Barrier] = deque()

    def launch(self, work: Callable[[], object]) -> None:
        self._device.launches += 1
        self.queue.append(work)

    def record(self) -> DeviceEvent:
        event = LateEvent(self._device)
        self.queue.append(event)
        return event

    def wait_for(self, event: DeviceEvent) -> None:
        assert isinstance(event, LateEvent)
        self.queue.append(Barrier(event))

    @property
    def is_ready(self) -> bool:
        """Whether its oldest piece may run."""
        if not self.queue:
            return False
        return not isinstance(self.queue[0], Barrier) or self.queue[0].event.has_passed

    def run_one(self, error: DeviceError | None) -> DeviceError | None:
        """Run the oldest piece; the error that the device has from then on."""
        piece = self.queue.popleft()
        if isinstance(piece, LateEvent):
            if self is self._device.results:
                self._device.end_copies()
            piece.has_passed = True  # last: from here on another thread may free what was copied
        elif not isinstance(piece, Barrier) and error is None:
            try:
                piece()
            except DeviceError as failed:
                return failed
        return error


class LateStreams:
    """`Streams` of which an adversary decides when their work runs.

    Args:
        random: what it decides by.
    """

    is_immediate = False

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._lock = threading.RLock()
        self._queues = [LateStream(self) for _ in range(3)]
        self.forward: DeviceStream
        self.results: DeviceStream
        self.copies: DeviceStream
        self.forward, self.results, self.copies = self._queues
        self.error: DeviceError | None = None
        self.brought: list[weakref.ref[torch.Tensor]] = []
        """What is on its way to the host."""
        self.brought_bytes = 0
        """The bytes of all that was brought to the host."""
        self.entered: set[str] = set()
        """The threads that use it."""
        self.launches = 0
        """The pieces of work that it was given."""
        self.waits = 0
        """How often the host has waited for an event that had not passed."""

    def enter_thread(self) -> None:
        self.entered.add(threading.current_thread().name)

    def make_staging(self) -> Staging:
        return SpoiltStaging(self)

    def end_copies(self) -> None:
        """The copies to the host that were begun have ended."""
        assert all(one() is not None for one in self.brought), "what is copied was freed"
        self.brought.clear()

    @property
    def can_run(self) -> bool:
        """Whether any work may run."""
        return any(queue.is_ready for queue in self._queues)

    def run_one(self) -> None:
        """Run a piece of work of some stream."""
        with self._lock:
            ready = [queue for queue in self._queues if queue.is_ready]
            assert ready, "an event that is waited for can never pass"
            # Forwards are the latest of all: what the host hears of comes before them.
            weights = [1 if queue is self.forward else 4 for queue in ready]
            [chosen] = self._random.choices(ready, weights)
            self.error = chosen.run_one(self.error)

    def run_until(self, event: LateEvent) -> None:
        """Run pieces until an event has passed; from any thread."""
        while True:
            with self._lock:
                if event.has_passed:
                    return
                self.run_one()


class SpoiltSet(PinnedSet):
    """A set that keeps nothing of the use before."""

    def __init__(self, device: LateStreams) -> None:
        super().__init__(lambda nbytes: torch.full((nbytes,), SPOILT, dtype=torch.uint8))
        self._device = device

    def begin(self) -> None:
        super().begin()
        for block in self._blocks:
            block.fill_(SPOILT)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        self._device.brought.append(weakref.ref(tensor))
        self._device.brought_bytes += tensor.nbytes
        return super().bring(tensor)


class SpoiltStaging(PinnedStaging):
    """Staging of such sets."""

    def __init__(self, device: LateStreams) -> None:
        super().__init__(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        self._sets = [SpoiltSet(device) for _ in self._sets]


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow], counts: torch.Tensor) -> Draws:
    """`device_sampler.launch` of a device that is a CPU: the tokens of the CPU's sampler."""
    raw: Float32Array = logits.numpy()
    rows = [with_counted_tokens(row, counts) for row in rows]
    ids = torch.zeros(len(rows), dtype=torch.int64)
    largest = torch.zeros(len(rows))
    for index, row in enumerate(rows):
        edited = edit_logits(raw[index], row) if row.edits_logits else raw[index]
        largest[index] = float(edited.max())
        sampled = sample_token_id(raw[index], row)
        ids[index] = sampled if isinstance(sampled, int) else 0
    asked = [row.params.logprobs for row in rows]
    return Draws(ids, largest, asked, _scores(raw, ids.tolist(), asked))


def with_counted_tokens(row: SamplingRow, counts: torch.Tensor) -> SamplingRow:
    """The row that a host would have that knew all tokens; the order of them does not matter."""
    if row.counted_row is None:
        return row
    assert not row.output_ids, "they are counted already"
    entries = counts[row.counted_row].numpy()
    prompt, output = entries & IN_PROMPT, entries // IN_OUTPUT
    return replace(
        row,
        prompt_ids=np.flatnonzero(prompt).tolist(),
        output_ids=np.repeat(np.arange(len(entries)), output).tolist(),
    )


def _scores(raw: Float32Array, ids: Sequence[int], counts: Sequence[int | None]) -> Scores | None:
    wanted = [(row, count) for row, count in enumerate(counts) if count is not None]
    if not wanted:
        return None
    rows = [row for row, _ in wanted]
    return score(
        torch.from_numpy(raw), rows, [ids[row] for row in rows], [count for _, count in wanted]
    )


def score(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> Scores:
    """`device_sampler.launch_scores` of such a device."""
    raw: Float32Array = logits.numpy()
    width = 2 + max(counts)
    totals = torch.zeros(len(rows), dtype=torch.float64)
    tops = torch.zeros(len(rows), width, dtype=torch.int64)
    values = torch.zeros(len(rows), width)
    for place, (index, token_id, count) in enumerate(zip(rows, token_ids, counts, strict=True)):
        row = raw[index]
        likeliest = topk_indices(row, count)[:count] if count else np.empty(0, np.int64)
        chosen = [int(row.argmax()), token_id, *likeliest.tolist()]
        totals[place] = float(np.exp(row - row.max()).sum(dtype=np.float64))
        tops[place, : len(chosen)] = torch.tensor(chosen)
        values[place, : len(chosen)] = torch.from_numpy(row[chosen])
    return Scores(totals, tops, values, counts)
