"""What the router knows of the workers' prefixes, as workers tell it and requests come and go."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from kvrelay.router.generation import PromptMarks
from kvrelay.router.placement.known_prefixes import ExpectedMarks, KnownPrefixes
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

from .scripted_worker import ScriptedWorker

PAGE_SIZE = 64
HASHES = PageHashes(NO_MODEL, PAGE_SIZE)


def info_of(name: str, role: WorkerRole = WorkerRole.PREFILL) -> WorkerInfo:
    return dataclasses.replace(ScriptedWorker(name, role).endpoint, incarnation=name)


A, B, C = (info_of(name) for name in "abc")
D = info_of("d", WorkerRole.DECODE)


def prompt_of(*pages: int) -> list[int]:
    """A page's number stands for all of its tokens."""
    return [page for page in pages for _ in range(PAGE_SIZE)]


def marks(*pages: int, namespace: str = "") -> tuple[int, ...]:
    return HASHES.marks_of(prompt_of(*pages), namespace)


class Known(KnownPrefixes):
    """Knows some workers, and is told by them one update after the other."""

    def __init__(self, most_entries: int = 1000, *workers: WorkerInfo) -> None:
        super().__init__(most_entries)
        self.numbers: dict[str, int] = {}
        for worker in workers:
            self.tell(worker, begins=True)

    def tell(
        self,
        worker: WorkerInfo,
        stored: Sequence[int] = (),
        removed: Sequence[int] = (),
        *,
        begins: bool = False,
    ) -> None:
        number = 0 if begins else self.numbers[worker.incarnation]
        self.numbers[worker.incarnation] = number + 1
        update = PrefixUpdate(number, PAGE_SIZE, begins, tuple(stored), tuple(removed))
        assert not self.take(worker, update)

    def expected(self, worker: str, prompt: PromptMarks) -> ExpectedMarks:
        found = self.expect(worker, prompt)
        assert found is not None
        return found

    def hits(self, *pages: int, namespace: str = "", most: int = 8) -> dict[str, int]:
        """Pages by prefill worker."""
        prompt = self.marks_of(prompt_of(*pages), namespace)
        found = self.longest(WorkerRole.PREFILL, prompt, most)
        for worker, tokens in found.items():
            assert self.hit_tokens(worker, prompt) == tokens
        return {worker: tokens // PAGE_SIZE for worker, tokens in found.items()}


def test_the_longest_prefixes_are_found_by_role() -> None:
    known = Known(1000, A, B, C, D)
    known.tell(A, marks(1, 2, 3, 4))
    known.tell(B, marks(1, 2))
    known.tell(D, marks(1, 2, 3, 4, 5))
    assert known.hits(1, 2, 3, 4, 5) == {"a": 4, "b": 2}
    assert known.hits(1, 2, 3, 4, 5, most=1) == {"a": 4}
    assert known.hits(1, 9) == {"a": 1, "b": 1}
    assert known.hits(9) == {}
    prompt = known.marks_of(prompt_of(1, 2, 3, 4, 5), "")
    assert known.longest(WorkerRole.DECODE, prompt, 8) == {"d": 5 * PAGE_SIZE}


def test_another_tenants_prefixes_are_not_found() -> None:
    known = Known(1000, A)
    known.tell(A, marks(1, 2, namespace="one/"))
    assert known.hits(1, 2, namespace="one/") == {"a": 2}
    assert known.hits(1, 2, namespace="two/") == {}
    assert known.hits(1, 2, namespace="one/salt") == {}


def test_what_is_evicted_is_forgotten() -> None:
    known = Known(1000, A)
    known.tell(A, marks(1, 2, 3))
    known.tell(A, removed=marks(1, 2, 3)[1:])
    assert known.hits(1, 2, 3) == {"a": 1}
    assert known.num_entries == 1


def test_a_worker_that_begins_anew_or_is_lost_is_known_by_what_it_tells_then() -> None:
    known = Known(1000, A, B)
    known.tell(A, marks(1, 2))
    known.tell(B, marks(1, 2))
    known.tell(A, marks(7), begins=True)
    assert known.hits(1, 2) == {"b": 2}
    known.forget("b")
    assert known.hits(1, 2) == {}
    assert known.hits(7) == {"a": 1}
    known.forget("a")
    assert known.num_entries == 0
    successor = info_of("a2")
    known.tell(successor, marks(1), begins=True)
    assert known.hits(1, 2) == {"a2": 1}


def test_a_worker_that_tells_nothing_is_not_expected_to_have_anything() -> None:
    known = Known(1000, A)
    prompt = known.marks_of(prompt_of(1, 2), "")
    known.expect("b", prompt)
    assert known.hits(1, 2) == {}
    assert KnownPrefixes(1000).marks_of(prompt_of(1), "") == {}


def test_a_prompt_is_expected_where_it_was_sent_until_its_attempt_ends() -> None:
    known = Known(1000, A, B)
    prompt = known.marks_of(prompt_of(1, 2, 3), "")
    expected = known.expected("a", prompt)
    assert known.hits(1, 2, 3) == {"a": 3}
    known.tell(A, marks(1, 2))
    known.settle(expected)
    assert known.hits(1, 2, 3) == {"a": 2}
    known.settle(known.expected("b", prompt))
    assert known.hits(1, 2, 3) == {"a": 2}


def test_a_prompt_that_ends_leaves_what_another_one_stands_for() -> None:
    known = Known(1000, A)
    long, short = (known.marks_of(prompt_of(*range(pages)), "") for pages in (10, 6))
    first, second = known.expected("a", long), known.expected("a", short)
    known.settle(first)
    assert known.hits(*range(10)) == {"a": 6}
    known.settle(second)
    assert known.hits(*range(10)) == {}
    assert known.num_entries == 0
    assert not known._workers["a"].expected


def test_a_prompt_from_before_the_worker_told_anything_ends_for_itself_alone() -> None:
    known = Known(1000, B)
    prompt = known.marks_of(prompt_of(1, 2), "")
    assert known.expect("a", prompt) is None
    known.tell(A, begins=True)
    before = known.expected("a", prompt)
    known.tell(A, begins=True)
    since = known.expected("a", prompt)
    known.settle(before)
    assert known.hits(1, 2) == {"a": 2}
    known.settle(since)
    assert known.hits(1, 2) == {}
    assert known.num_entries == 0


@pytest.mark.parametrize("evicted", [True, False])
def test_what_was_forgotten_and_is_expected_again_stays_until_the_last_prompt_ends(
    *, evicted: bool
) -> None:
    known = Known(8, A, B)
    prompt = known.marks_of(prompt_of(1, 2), "")
    first = known.expected("a", prompt)
    if evicted:
        known.tell(A, removed=marks(1, 2))
    else:
        known.tell(B, [*range(8)])
    assert known.hits(1, 2) == {}
    second = known.expected("a", prompt)
    known.settle(first)
    assert known.hits(1, 2) == {"a": 2}
    known.settle(second)
    assert known.hits(1, 2) == {}
    assert not known._workers["a"].expected


def test_no_call_removes_much_of_workers_that_are_gone() -> None:
    known = Known(1 << 20, *(workers := [info_of(f"w{index}") for index in range(8)]))
    for index, worker in enumerate(workers):
        known.tell(worker, [*range(index * 10_000, index * 10_000 + 20_000)])
    left = known.num_entries
    for worker in workers[:7]:
        known.forget(worker.incarnation)
        assert left - known.num_entries <= 4096
        left = known.num_entries
    for start in range(200_000, 400_000, 4096):
        known.tell(workers[7], [*range(start, start + 4096)])
        removed = left + 4096 - known.num_entries
        assert 0 <= removed <= 4096
        left = known.num_entries
    assert {*known._masks} == {*known._workers["w7"].marks}
    assert [*known._by_bit.values()] == [("w7", known._workers["w7"])]


def test_what_is_left_of_a_worker_that_is_gone_is_forgotten_like_the_rest() -> None:
    known = Known(10_000, A, B)
    known.tell(A, [*range(10_000)])
    known.forget("a")
    known.tell(B, [*range(20_000, 40_000)])
    assert known.num_entries == 10_000
    known.tell(B, [*range(40_000, 44_096)])
    assert {*known._masks} == {*known._workers["b"].marks}
    assert known.num_entries == len(known._masks) == 10_000


def test_pages_are_counted_for_each_way_to_hash() -> None:
    known = Known(1000, A)
    assert known.pages_of(1000) == 15
    known.take(B, PrefixUpdate(0, 1, True))
    assert known.pages_of(1000) == 1015


def test_after_a_gap_a_worker_is_asked_once_and_heard_when_it_begins_anew() -> None:
    known = Known(1000, A)
    known.tell(A, marks(1))
    assert known.take(A, PrefixUpdate(7, PAGE_SIZE, stored=marks(2)))
    assert not known.take(A, PrefixUpdate(8, PAGE_SIZE, stored=marks(3)))
    assert known.hits(2) == {}
    known.tell(A, marks(4), begins=True)
    assert known.hits(4) == {"a": 1}
    known.tell(A, marks(5))
    assert known.hits(1) == {}
    assert known.hits(5) == {"a": 1}


def test_a_stream_whose_first_update_is_missed_is_asked_too() -> None:
    known = KnownPrefixes(1000)
    assert known.take(A, PrefixUpdate(1, PAGE_SIZE, stored=marks(2)))


def test_the_least_recently_used_ends_of_prefixes_are_forgotten_first() -> None:
    known = Known(8, A, B)
    known.tell(A, marks(1, 2, 3, 4))
    known.tell(B, marks(5, 6, 7, 8))
    known.expect("a", known.marks_of(prompt_of(1, 2, 3, 4), ""))
    known.tell(B, marks(9, 10))
    assert known.hits(5, 6, 7, 8) == {"b": 2}
    assert known.hits(1, 2, 3, 4) == {"a": 4}
    assert known.num_entries == 8


def test_nothing_is_remembered_if_there_may_be_no_entries() -> None:
    known = Known(0, A)
    known.tell(A, marks(1))
    assert known.marks_of(prompt_of(1), "") == {}
    assert known.num_entries == 0


def test_workers_with_other_page_sizes_have_marks_of_their_own() -> None:
    known = Known(1000, A)
    small = PageHashes(NO_MODEL, 16)
    known.tell(A, marks(1, 2))
    known.take(B, PrefixUpdate(0, 16, True, small.marks_of(prompt_of(1, 2, 3), "")))
    assert known.hits(1, 2, 3) == {"a": 2, "b": 3}


@pytest.mark.parametrize("num_tokens", [0, 63, 64, 16_384, 16_385, 40_000])
def test_the_marks_of_a_long_prompt_are_made_in_pieces(num_tokens: int) -> None:
    known, prompt = Known(1000, A), [token % 1000 for token in range(num_tokens)]
    assert [*known.marks_of(prompt, "t/").values()] == [HASHES.marks_of(prompt, "t/")]


@pytest.mark.parametrize("seed", range(4))
def test_in_random_use_it_knows_what_was_told_and_what_is_expected(seed: int) -> None:
    rng, known = random.Random(seed), Known(10_000, A, B, C)
    workers = {worker.incarnation: worker for worker in (A, B, C)}
    told: dict[str, set[int]] = {name: set() for name in workers}
    sent: list[tuple[str, tuple[int, ...], ExpectedMarks]] = []
    for _ in range(400):
        name = rng.choice("abc")
        pages = tuple(rng.randrange(3) for _ in range(rng.randint(1, 6)))
        prompt, chance = known.marks_of(prompt_of(*pages), ""), rng.random()
        if chance < 0.4:
            told[name] |= {*marks(*pages)}
            known.tell(workers[name], marks(*pages))
        elif chance < 0.6 and not any(to == name for to, *_ in sent):
            gone = {one for one in told[name] if rng.random() < 0.2}
            told[name] -= gone
            known.tell(workers[name], removed=tuple(gone))
        elif chance < 0.7:
            told[name] = {*marks(*pages)}
            sent = [one for one in sent if one[0] != name]
            known.forget(name)
            known.tell(workers[name], marks(*pages), begins=True)
        elif chance < 0.85:
            sent.append((name, pages, known.expected(name, prompt)))
        elif sent:
            known.settle(sent.pop()[2])
        expected = {name: set(has) for name, has in told.items()}
        for name, pages, _ in sent:
            expected[name] |= {*marks(*pages)}
        assert {n: set(w.marks) for n, w in known._workers.items()} == expected
        assert known.num_entries == sum(map(len, expected.values()))
        masks = {mark for has in expected.values() for mark in has}
        assert {*known._masks} == masks
