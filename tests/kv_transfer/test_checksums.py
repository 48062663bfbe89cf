"""Checksums of pages: what they see, and what they must not."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvrelay.kv_transfer.checksums import LocalPage, PageHasher, locate
from kvrelay.kv_transfer.verify_pages import SAMPLED_PART, VerifyPages, choose
from kvrelay.mem_cache.byte_sum import hash_bytes
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.hand_over import PagePlace, PageSum

TOKENS = 16
PLACES = [PagePlace(pool, page) for pool in range(2) for page in range(40)]


def random_pool(order: PageOrder, *, latent: bool = False, seed: int = 0) -> KVPool:
    heads = 1 if latent else 2
    geometry = KVGeometry(3, heads, 32, torch.bfloat16, TOKENS, order, latent=latent)
    pool = KVPool(geometry, 8, torch.device("cpu"))
    pool.data.normal_(generator=torch.Generator().manual_seed(seed))
    return pool


class Sums:
    """Hashes pages of pools, one after the other."""

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._hashers: list[PageHasher] = []

    def __call__(self, pool: KVPool, page_id: int, tokens: int = TOKENS) -> int:
        hasher = PageHasher([pool], self._failures.append)
        self._hashers.append(hasher)
        ended: queue.SimpleQueue[tuple[PageSum, ...]] = queue.SimpleQueue()
        hasher.submit([LocalPage(PagePlace(0, 3), page_id, tokens)], ended.put)
        (found,) = ended.get(timeout=60)
        assert found.place == (0, 3)
        return found.value

    def close(self) -> None:
        for hasher in self._hashers:
            hasher.close()
        assert not self._failures


@pytest.fixture
def sums() -> Iterator[Sums]:
    sums = Sums()
    yield sums
    sums.close()


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_a_copy_has_the_same_sum_in_either_order(sums: Sums, tokens: int, latent: bool) -> None:
    source = random_pool(PageOrder.PAGE_FIRST, latent=latent)
    target = random_pool(PageOrder.LAYER_FIRST, latent=latent, seed=1)
    copy_pages(source, [2], target, [7])
    assert sums(source, 2, tokens) == sums(target, 7, tokens)
    assert sums(source, 2, tokens) != sums(source, 3, tokens)


@pytest.mark.parametrize("order", list(PageOrder))
def test_any_settled_byte_changes_the_sum_and_no_other(sums: Sums, order: PageOrder) -> None:
    pool = random_pool(order)
    before = sums(pool, 4, tokens=5)
    for layer in range(3):
        for part, head, token in ((0, 0, 0), (1, 1, 4)):
            value = pool.layer(layer)[4][part, head, token, 31:].view(torch.uint8)
            value ^= 1
            assert sums(pool, 4, tokens=5) != before
            value ^= 1
    pool.layer(1)[4][:, :, 5:] = 0
    assert sums(pool, 4, tokens=5) == before
    assert sums(pool, 4) != before


def test_words_that_differ_in_one_place_have_other_sums() -> None:
    """These two have the same sum where the upper half is added in place of being folded in."""
    pair = np.array([0x0000000014E70B38, 0xA61FD45800000000], np.uint64)
    assert len({hash_bytes(one.reshape(1).view(np.uint8)) for one in pair}) == 2
    page = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)
    sums = {hash_bytes(page.view(np.uint8))}
    for place in range(len(page)):
        for bit in (0, 31, 32, 63):
            changed = page.copy()
            changed[place] ^= np.uint64(1) << np.uint64(bit)
            sums.add(hash_bytes(changed.view(np.uint8)))
    assert len(sums) == 1 + 4 * len(page)


def test_a_page_that_is_not_there_is_the_workers_failure() -> None:
    failures: list[str] = []
    hasher = PageHasher([random_pool(PageOrder.PAGE_FIRST)], failures.append)
    hasher.submit([LocalPage(PagePlace(1, 0), 0, TOKENS)], lambda sums: None)
    hasher.close()
    assert len(failures) == 1


def test_sample_is_the_requests_own_and_never_empty() -> None:
    for count in (1, 5, SAMPLED_PART, 80):
        places = PLACES[:count]
        for number in range(50):
            chosen = choose(VerifyPages.SAMPLE, places, f"request-{number}")
            assert chosen == choose(VerifyPages.SAMPLE, places, f"request-{number}")
            assert 1 <= len(chosen) <= -(-count // SAMPLED_PART)
            assert set(chosen) <= set(places)
    by_request = [choose(VerifyPages.SAMPLE, PLACES, str(number)) for number in range(300)]
    assert {place for chosen in by_request for place in chosen} == set(PLACES)
    assert choose(VerifyPages.SAMPLE, [], "nothing was read") == []


def test_off_and_all() -> None:
    assert choose(VerifyPages.OFF, PLACES, "x") == []
    assert choose(VerifyPages.ALL, PLACES, "x") == PLACES


def test_the_last_page_counts_as_far_as_it_is_filled() -> None:
    tables = [[5, 6, 7], [-1, 9, 8]]
    found = locate([PagePlace(0, 1), PagePlace(0, 2), PagePlace(1, 2)], tables, 4, 10)
    assert [(page.page_id, page.tokens) for page in found] == [(6, 4), (7, 2), (8, 2)]


@pytest.mark.parametrize("place", [(0, 3), (1, 0), (2, 0), (0, 2)])
def test_what_is_not_held_is_not_hashed(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not held"):
        locate([PagePlace(*place)], [[5, 6, 7], [-1, 9, 8]], 4, 8)
