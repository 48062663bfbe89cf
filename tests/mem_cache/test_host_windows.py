"""The account of windows' parts on the host: what is found with them, and which go first."""

from __future__ import annotations

import random

import pytest

from kvrelay.mem_cache.host.host_page import HostPage, HostPart
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.host_windows import HostWindow

SIZE = 4
BEHIND = 2


class Host:
    """Pages and parts of one window, of which a token sees two pages. A prompt is a word."""

    def __init__(self, pages: int, parts: int) -> None:
        self.window = HostWindow(1, "host_window", parts, SIZE, BEHIND)
        self.pages = HostPages(pages, SIZE, lambda page, found: None, {1: self.window})

    def keys(self, word: str) -> list[bytes]:
        return [word[: end + 1].encode() for end in range(len(word))]

    def row(self, word: str) -> list[HostPage]:
        return self.pages.find(self.keys(word), [letter.encode() for letter in word])

    def begin(self, word: str) -> tuple[list[HostPage], list[HostPart]]:
        keys = self.keys(word)
        first = self.pages.num_known(keys)
        before = keys[first - 1] if first else None
        tokens = [letter.encode() for letter in word]
        pages = self.pages.reserve(before, keys[first:], tokens[first:], first)
        return pages, self.window.reserve(pages)

    def write(self, word: str) -> int:
        """How many parts there was room for."""
        pages, parts = self.begin(word)
        self.pages.end_write(pages, len(pages))
        self.pages.end_window_write(1, parts, [True] * len(parts))
        self.pages.check_pages()
        return len(parts)

    def has(self, word: str) -> str:
        """The letters of a word whose pages have their parts."""
        row = zip(word, self.row(word), strict=False)
        return "".join(letter for letter, page in row if self.window.part(page))

    def end(self, word: str) -> str:
        """As far as a prompt can be continued."""
        return word[: self.pages.num_continuable(self.row(word))]

    def state(self) -> tuple[int, int, int, int]:
        """Parts that are free, evictable, read by copies, in flight."""
        self.pages.check_pages()
        counts = self.window.counts()
        return counts.free, counts.cached_evictable, counts.cached_protected, counts.in_flight


def test_a_prefix_ends_where_its_window_is_whole() -> None:
    host = Host(8, 8)
    host.write("abcdef")
    assert host.end("abcdef") == "abcdef"
    row = host.row("abcdef")
    host.window.drop(row[4].parts[1])
    assert host.end("abcdef") == "abcd"
    host.window.drop(row[2].parts[1])
    assert host.end("abcdef") == "ab"
    host.window.drop(row[0].parts[1])
    assert host.end("abcdef") == ""


def test_a_part_is_read_only_once_it_is_written() -> None:
    host = Host(4, 4)
    pages, parts = host.begin("ab")
    assert host.state() == (2, 0, 0, 2)
    host.pages.end_write(pages, 2)
    assert host.end("ab") == ""
    host.pages.end_window_write(1, parts, [True, False])
    assert (host.has("ab"), host.end("ab")) == ("a", "a")
    assert host.state() == (3, 1, 0, 0)


def test_if_not_all_parts_fit_the_last_ones_are_kept() -> None:
    host = Host(8, 3)
    assert host.write("abcdef") == 3
    assert host.has("abcdef") == "def"
    assert host.end("abcdef") == "abcdef"


def test_a_long_prompt_takes_the_room_of_its_own_beginning() -> None:
    host = Host(20, 6)
    host.write("xy")
    for end in range(1, 11):
        host.write("abcdefghij"[:end])
    assert host.has("xy") == "xy", "though it was used longest ago"
    assert host.has("abcdefghij").endswith("ij")
    assert (host.end("xy"), host.end("abcdefghij")) == ("xy", "abcdefghij")


def test_where_prompts_part_the_window_stays() -> None:
    """What two continue is passed by the first. The second uses it, and does not pass it."""
    host = Host(40, 10)
    host.write("ab")
    host.write("abcdef")
    assert host.end("ab") == "ab"
    host.window.use([page.parts[1] for page in host.row("ab")])
    host.write("abuvwx")
    assert host.state()[0] == 0
    host.write("1234")
    assert host.has("ab") == "ab"


def test_where_prompts_part_later_the_window_stays() -> None:
    """The first passed it when nobody else went on there; the second had it on the device."""
    host = Host(40, 10)
    host.write("abcdef")
    host.write("abuvwx")
    assert host.state()[0] == 0
    host.write("1234")
    assert host.has("abcdef") == "abef"
    assert (host.end("ab"), host.end("abcdef"), host.end("abuvwx")) == ("ab", "abcdef", "abuvwx")


def test_parts_that_a_copy_reads_are_not_evicted() -> None:
    host = Host(8, 2)
    host.write("ab")
    read = [page.parts[1] for page in host.row("ab")]
    host.window.pin(read)
    assert host.write("xy") == 0
    assert host.state() == (0, 0, 2, 0)
    host.window.unpin(read)
    assert host.write("uv") == 2
    assert (host.end("ab"), host.end("uv")) == ("", "uv")


def test_parts_go_with_their_page_and_wait_for_copies() -> None:
    host = Host(8, 8)
    host.write("abc")
    pages, parts = host.begin("abcd")
    read = [page.parts[1] for page in host.row("ab")]
    host.window.pin(read)
    assert host.pages.forget(b"a") == 4
    # Read: a, b. Written: d.
    assert host.state() == (5, 0, 0, 3)
    host.window.unpin(read)
    host.pages.end_write(pages, 1)
    host.pages.end_window_write(1, parts, [True])
    assert host.state() == (8, 0, 0, 0)


def test_an_evicted_page_takes_its_part_along() -> None:
    host = Host(2, 8)
    host.write("ab")
    host.write("xy")
    assert host.row("ab") == []
    assert host.state() == (6, 2, 0, 0)


def test_a_part_may_come_back_to_a_page_that_has_lost_it() -> None:
    host = Host(8, 2)
    host.write("ab")
    host.write("xy")
    assert (host.has("ab"), host.end("ab")) == ("", "")
    parts = host.window.reserve(host.row("ab"))
    host.pages.end_window_write(1, parts, [True, True])
    assert (host.end("ab"), host.end("xy")) == ("ab", "")
    assert host.state() == (0, 2, 0, 0)


@pytest.mark.parametrize("behind", [(2,), (1, 3), (4, 2, 4)])
def test_a_row_is_continued_at_the_last_end_that_no_window_lacks(behind: tuple[int, ...]) -> None:
    rng = random.Random(7)
    for _ in range(200):
        windows = {
            pool: HostWindow(pool, f"host_{pool}", 12, SIZE, pages)
            for pool, pages in enumerate(behind)
        }
        host = HostPages(12, SIZE, lambda page, found: None, windows)
        keys = [b"%d" % number for number in range(rng.randrange(13))]
        row = host.reserve(None, keys, keys, 0)
        host.end_write(row, len(row))
        here = {pool: [rng.random() < 0.7 for _ in row] for pool in windows}
        for pool, has_part in here.items():
            pages = [page for page, has in zip(row, has_part, strict=True) if has]
            parts = windows[pool].reserve(pages)
            host.end_window_write(pool, parts, [True] * len(parts))
        ends = [
            end
            for end in range(len(row) + 1)
            if all(all(here[pool][max(0, end - n) : end]) for pool, n in enumerate(behind))
        ]
        assert host.num_continuable(row) == ends[-1]
