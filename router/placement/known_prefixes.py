"""The router's approximate knowledge of the workers' cached prefixes.

It learns from the workers' updates, and expects a prompt to be where it has sent it until that
attempt ends. It may be wrong: then a prompt is computed that was expected to be cached, or a cached
one is computed again. It may also be lost; the workers then send it anew.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvrelay.router.generation import PromptMarks
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes, token_bytes
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_CLEANED_AT_ONCE: Final = 4096
"""The most marks cleaned at once, as many as an update stores at most: cleaning keeps up."""
_HASHED_AT_ONCE: Final = 256
"""Pages hashed before another thread gets its turn: hashing such short pieces holds the GIL."""


@dataclass(eq=False, slots=True)
class _Worker:
    """The router's knowledge of one incarnation."""

    bit: int
    """The worker's own bit in the masks."""
    role: WorkerRole
    hashes: PageHashes
    next_number: int = 0
    lacks_updates: bool = False
    """Whether an update was missed: the worker was asked to send all anew."""
    forgotten: bool = False
    """Whether it is lost, or has begun to send all anew: nothing is expected of it any more."""
    marks: dict[int, bool] = field(default_factory=dict)
    """The worker's marks; True: the worker has reported it, False: it is only expected."""
    expected: dict[int, int] = field(default_factory=dict)
    """The number of unfinished prompts for which a mark is expected, even if it was forgotten."""

    def drop(self, mark: int) -> bool:
        """Drop a mark; return whether it was there."""
        return self.marks.pop(mark, None) is not None


@dataclass(frozen=True, eq=False, slots=True)
class ExpectedMarks:
    """The marks of a prompt that was sent to a worker, with the worker's state at that time."""

    worker: _Worker
    marks: tuple[int, ...]


class KnownPrefixes:
    """The marks of cached prefixes, each with the workers that have it.

    A mark stands for the whole prefix up to it, so the longest match is found by a binary search.
    An entry is a mark on a worker. Above the bound, the least recently used entries are forgotten.
    Use it on one thread, except for `marks_of`.

    Args:
        most_entries: the most entries that are remembered; 0: none.
    """

    def __init__(self, most_entries: int) -> None:
        self._most_entries = most_entries
        self._num_entries = 0
        self._masks: OrderedDict[int, int] = OrderedDict()  # by mark, least recently used first
        self._workers: dict[str, _Worker] = {}  # by incarnation
        self._by_bit: dict[int, tuple[str, _Worker]] = {}
        self._role_masks = dict.fromkeys(WorkerRole, 0)
        self._forgotten: list[_Worker] = []  # whose bits are still in masks
        self._num_bits = 0
        self._free_bits: list[int] = []
        self._hashes: dict[tuple[ModelDigest, int], PageHashes] = {}

    @property
    def num_entries(self) -> int:
        """The number of remembered entries; for any thread."""
        return self._num_entries

    def pages_of(self, num_tokens: int) -> int:
        """The pages that `marks_of` hashes, about a microsecond each; for any thread."""
        return sum(num_tokens // hashes.page_size for hashes in self._hashes.values())

    def marks_of(self, input_ids: Sequence[int], namespace: str) -> PromptMarks:
        """The marks of a prompt, for the workers that are known now; for any thread.

        It takes a millisecond for 16,000 tokens, and releases the GIL several times meanwhile.
        """
        kinds = list(self._hashes.values())
        return {hashes: _marks(hashes, input_ids, namespace) for hashes in kinds}

    # Updates from workers

    def take(self, info: WorkerInfo, update: PrefixUpdate) -> bool:
        """Apply a worker's update.

        Returns:
            Whether the worker must be asked to send all anew, because an update is missing.
        """
        if not self._most_entries:
            return False
        worker = self._workers.get(info.incarnation)
        if worker is None or update.begins:
            worker = self._begin(info, update)
        if worker.lacks_updates:
            return False
        if update.number != worker.next_number:
            worker.lacks_updates = True
            return True
        worker.next_number += 1
        for mark in reversed(update.stored):
            self._add(worker, mark, told=True)
        for mark in update.removed:
            self._remove(worker, mark)
        self._clean()
        return False

    def forget(self, incarnation: str) -> None:
        """Forget all about a worker, until it sends all anew."""
        worker = self._workers.pop(incarnation, None)
        if worker is None:
            return
        worker.forgotten = True
        self._role_masks[worker.role] &= ~worker.bit
        self._forgotten.append(worker)
        in_use = {one.hashes for one in self._workers.values()}
        self._hashes = {key: one for key, one in self._hashes.items() if one in in_use}
        self._clean()

    # Prompts that the router has sent

    def expect(self, incarnation: str, prompt: PromptMarks) -> ExpectedMarks | None:
        """Note that a prompt was sent to a worker, so its prefixes will be there.

        Returns the expected marks, for `settle`; None: none.
        """
        worker = self._workers.get(incarnation)
        if worker is None:
            return None
        marks = prompt.get(worker.hashes, ())
        for mark in reversed(marks):  # so that the end of a prefix is forgotten before its start
            worker.expected[mark] = worker.expected.get(mark, 0) + 1
            self._add(worker, mark, told=False)
        self._clean()
        return ExpectedMarks(worker, marks)

    def settle(self, expected: ExpectedMarks) -> None:
        """Note that a prompt that was expected on a worker has ended there.

        Drop its marks that the worker has not reported, unless another prompt still expects them.
        """
        worker = expected.worker
        if worker.forgotten:
            return
        for mark in expected.marks:
            count = worker.expected.pop(mark) - 1
            if count:
                worker.expected[mark] = count
            elif worker.marks.get(mark) is False:
                self._remove(worker, mark)

    # Queries of placement

    def longest(
        self,
        role: WorkerRole,
        prompt: PromptMarks,
        most_workers: int,
        may_be: Callable[[str], bool] = lambda incarnation: True,
    ) -> dict[str, int]:
        """The workers of a role that have the longest prefixes of a prompt, and their tokens.

        Args:
            role: the workers' role.
            prompt: its marks.
            most_workers: the most workers; among equally long prefixes they are drawn at random.
            may_be: whether an incarnation may be among them.
        """
        found: dict[str, int] = {}
        for hashes, marks in prompt.items():
            mask, length = self._role_masks[role], len(marks)
            while mask and len(found) < most_workers:
                length = self._match(marks, mask, length)
                if not length:
                    break
                here = self._masks[marks[length - 1]] & mask
                mask &= ~here
                wanted = filter(may_be, self._incarnations(here))
                for incarnation in islice(wanted, most_workers - len(found)):
                    found[incarnation] = length * hashes.mark_tokens
        return found

    def hit_tokens(self, incarnation: str, prompt: PromptMarks) -> int:
        """The tokens of a prompt whose KV a worker is known to have."""
        worker = self._workers.get(incarnation)
        marks = prompt.get(worker.hashes) if worker is not None else None
        if worker is None or not marks:
            return 0
        return self._match(marks, worker.bit, len(marks)) * worker.hashes.mark_tokens

    def _match(self, marks: Sequence[int], mask: int, most: int) -> int:
        """Count the first of `most` marks, from the start, that any worker of a mask has."""
        masks, low, high = self._masks, 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if masks.get(marks[middle - 1], 0) & mask:
                low = middle
            else:
                high = middle - 1
        return low

    def _incarnations(self, mask: int) -> Iterator[str]:
        """Iterate over the workers of a mask, from a random one on."""
        start = random.randrange(mask.bit_length())  # noqa: S311 (no secret)
        for part in (mask >> start << start, mask & ((1 << start) - 1)):
            while part:
                bit = part & -part
                part ^= bit
                yield self._by_bit[bit][0]

    # The marks

    def _begin(self, info: WorkerInfo, update: PrefixUpdate) -> _Worker:
        kind = (info.model, update.page_size)
        hashes = self._hashes.get(kind) or PageHashes(*kind)
        self.forget(info.incarnation)
        self._hashes = {**self._hashes, kind: hashes}
        worker = _Worker(self._take_bit(), info.role, hashes)
        self._workers[info.incarnation] = worker
        self._by_bit[worker.bit] = (info.incarnation, worker)
        self._role_masks[info.role] |= worker.bit
        return worker

    def _add(self, worker: _Worker, mark: int, *, told: bool) -> None:
        masks, marks = self._masks, worker.marks
        before = marks.get(mark)
        if before is None:
            masks[mark] = masks.get(mark, 0) | worker.bit
            self._num_entries += 1
        marks[mark] = told or bool(before)
        masks.move_to_end(mark)
        while self._num_entries > self._most_entries:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        mark, mask = self._masks.popitem(last=False)
        while mask:
            bit = mask & -mask
            mask ^= bit
            self._by_bit[bit][1].drop(mark)
            self._num_entries -= 1

    def _remove(self, worker: _Worker, mark: int) -> None:
        if worker.drop(mark):
            self._clear_bit(worker, mark)

    def _clear_bit(self, worker: _Worker, mark: int) -> None:
        self._num_entries -= 1
        mask = self._masks[mark] & ~worker.bit
        if mask:
            self._masks[mark] = mask
        else:
            del self._masks[mark]

    def _clean(self) -> None:
        """Remove the next marks of forgotten workers."""
        left = _CLEANED_AT_ONCE
        while self._forgotten and left > 0:
            worker = self._forgotten[-1]
            while worker.marks and left > 0:
                mark, _ = worker.marks.popitem()
                self._clear_bit(worker, mark)
                left -= 1
            if not worker.marks:
                del self._by_bit[worker.bit]
                self._free_bits.append(worker.bit)
                self._forgotten.pop()

    def _take_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)


def _marks(hashes: PageHashes, input_ids: Sequence[int], namespace: str) -> tuple[int, ...]:
    """Hash the prompt like `PageHashes.marks_of`, but in pieces."""
    tokens, before, marks = token_bytes(input_ids), hashes.root(namespace), []
    step = _HASHED_AT_ONCE * hashes.page_size * 4
    for piece, start in enumerate(range(0, len(tokens), step)):
        if piece:
            time.sleep(0)
        pages = hashes.extend(before, tokens[start : start + step])
        marks += hashes.marks(pages, piece * _HASHED_AT_ONCE)
        before = pages[-HASH_BYTES:]
    return tuple(marks)
