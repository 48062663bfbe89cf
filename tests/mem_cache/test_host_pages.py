"""The account of the host pool: who may be evicted, what is found, what forgetting takes along."""

from __future__ import annotations

import pytest

from kvrelay.mem_cache.host.host_page import HostPage, HostPageState
from kvrelay.mem_cache.host.host_pages import HostPages

SIZE = 4


class Host:
    """A host pool whose pages are named by letters; a prompt is a word."""

    def __init__(self, total: int) -> None:
        self.found: dict[bytes, bool] = {}
        self.pages = HostPages(total, SIZE, self._record)

    def _record(self, page: HostPage, found: bool) -> None:
        assert self.found.get(page.key, False) is not found
        self.found[page.key] = found

    def keys(self, word: str) -> list[bytes]:
        return [word[: end + 1].encode() for end in range(len(word))]

    def tokens(self, word: str) -> list[bytes]:
        return [letter.encode() for letter in word]

    def reserve(self, word: str) -> list[HostPage]:
        keys = self.keys(word)
        first = self.pages.num_known(keys)
        before = keys[first - 1] if first else None
        return self.pages.reserve(before, keys[first:], self.tokens(word)[first:], first)

    def write(self, word: str) -> int:
        pages = self.reserve(word)
        self.pages.end_write(pages, len(pages))
        self.pages.check_pages()
        return len(pages)

    def find(self, word: str) -> list[HostPage]:
        return self.pages.find(self.keys(word), self.tokens(word))

    def state(self) -> tuple[int, int, int, int]:
        """Free, evictable, read by copies, in flight."""
        self.pages.check_pages()
        counts = self.pages.counts()
        return counts.free, counts.cached_evictable, counts.cached_protected, counts.in_flight


def test_a_page_is_found_only_once_it_is_written():
    host = Host(4)
    pages = host.reserve("abc")
    assert host.state() == (1, 0, 0, 3)
    assert host.find("abc") == []
    host.pages.end_write(pages, 2)
    assert host.find("abc") == pages[:2]
    assert host.state() == (2, 2, 0, 0)


def test_the_least_recently_used_goes_first_and_from_its_end():
    host = Host(4)
    host.write("ab")
    host.write("xy")
    host.find("ab")
    assert host.write("q") == 1
    assert [len(host.find(word)) for word in ("ab", "xy", "q")] == [2, 1, 1]
    assert host.pages.evicted == 1


def test_a_page_that_is_used_again_outlives_what_was_used_before():
    host = Host(3)
    for word in "abc":
        host.write(word)
    for word in "ca":
        host.find(word)
    for word in "xyz":
        host.write(word)
        gone = [one for one in "abc" if not host.found[one.encode()]]
        assert gone == {"x": ["b"], "y": ["b", "c"], "z": ["a", "b", "c"]}[word]


def test_the_page_that_is_continued_stays_and_may_go_later():
    host = Host(1)
    host.write("a")
    assert host.reserve("ab") == []
    assert host.write("x") == 1
    assert host.find("a") == []


def test_what_stays_costs_evictions_nothing(monkeypatch: pytest.MonkeyPatch):
    """What copies read is older than all that is evicted. It is looked at once, not each time."""
    number, looks = 300, 0
    host = Host(3 * number)

    def write(name: str) -> list[HostPage]:
        pages = host.pages.reserve(None, [name.encode()], [b"x"], 0)
        host.pages.end_write(pages, 1)
        return pages

    def look(page: HostPage) -> bool:
        nonlocal looks
        looks += 1
        return not page.children and not page.pins and page.state is HostPageState.CACHED

    host.pages.pin([page for one in range(2 * number) for page in write(f"read {one}")])
    for one in range(number):
        write(f"old {one}")
    monkeypatch.setattr(HostPage, "may_go", property(look))
    for one in range(number):
        write(f"new {one}")
    assert host.pages.evicted == number
    assert looks < 10 * number
    host.pages.check_pages()


def test_pages_that_a_copy_reads_are_not_evicted():
    host = Host(3)
    host.write("abc")
    read = host.find("abc")
    host.pages.pin(read[1:])
    assert host.write("xy") == 0
    assert host.state() == (0, 1, 2, 0)
    host.pages.unpin(read[1:])
    assert host.write("xy") == 2
    assert host.find("abc") == read[:1]


def test_what_a_new_page_continues_is_not_evicted_for_it():
    host = Host(2)
    host.write("a")
    host.write("x")
    assert host.write("abc") == 1
    assert len(host.find("ab")) == 2


def test_pages_with_other_tokens_are_not_found():
    host = Host(2)
    host.write("ab")
    assert host.pages.find(host.keys("ab"), [b"a", b"z"]) == host.find("a")


def test_forgetting_takes_along_what_continues_it_and_waits_for_copies():
    host = Host(8)
    host.write("abc")
    host.write("axy")
    writing = host.reserve("abcd")
    read = host.find("ax")
    host.pages.pin(read)
    assert host.pages.forget(b"a") == 6
    assert host.find("abc") == []
    # Read: a, x. Written: d.
    assert host.state() == (5, 0, 0, 3)
    host.pages.unpin(read)
    host.pages.end_write(writing, 1)
    assert host.state() == (8, 0, 0, 0)
    assert not any(host.found.values())


def test_what_was_forgotten_while_it_was_written_is_written_anew():
    host = Host(4)
    cleared = host.reserve("ab")
    host.pages.forget(b"a")
    fresh = host.reserve("ab")
    host.pages.end_write(cleared, 2)
    assert host.find("ab") == []
    host.pages.end_write(fresh, 2)
    assert host.find("ab") == fresh
    assert host.state() == (2, 2, 0, 0)
