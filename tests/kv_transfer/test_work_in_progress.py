"""For how long a thread has been at the piece of work that it is at."""

from __future__ import annotations

import threading

import torch

from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.kv_transfer.checksums import LocalPage, PageHasher
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.wire.hand_over import PagePlace


def test_the_oldest_piece_counts_from_the_end_of_the_one_before_it():
    work = WorkInProgress()
    assert work.oldest is None
    work.begin(3)
    work.begin(500, 7)
    first = work.oldest
    assert first is not None
    assert first.tokens == 3
    work.end()
    second = work.oldest
    assert second is not None
    assert (second.tokens, second.number) == (500, 7)
    work.end()
    assert work.oldest is None


def test_a_hasher_that_hangs_is_at_its_oldest_order():
    pool = KVPool(KVGeometry(1, 1, 4, torch.float32, 2), 4, torch.device("cpu"))
    hasher = PageHasher([pool], on_failure=lambda reason: None)
    begun, go_on = threading.Event(), threading.Event()

    def hang(sums: object) -> None:
        begun.set()
        go_on.wait()

    hasher.submit([LocalPage(PagePlace(0, 0), 1, 2)], hang)
    hasher.submit([LocalPage(PagePlace(0, 0), 1, 1)], lambda sums: None)
    begun.wait()
    oldest = hasher.work.oldest
    assert oldest is not None
    assert oldest.tokens == 2
    go_on.set()
    hasher.close()
    assert hasher.work.oldest is None
