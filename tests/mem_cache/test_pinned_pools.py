"""Host pools are pinned for a GPU as a whole or not at all, and let go of once."""

from __future__ import annotations

import pytest
import torch

from kvrelay.device.cuda_streams import CudaPinning, make_pinning
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from tests.mem_cache.pinning_double import LimitedPinning

GEOMETRY = KVGeometry(2, 1, 8, torch.float32, page_size=4, order=PageOrder.PAGE_FIRST)


def make_pools(*pages: int) -> list[KVPool]:
    return [KVPool(GEOMETRY, number, torch.device("cpu")) for number in pages]


def test_all_pools_are_pinned_until_they_are_closed() -> None:
    pinning, pools = LimitedPinning(), make_pools(3, 5)
    pinned = PinnedPools(pools, pinning)
    assert pinning.pinned == {pool.address: pool.nbytes for pool in pools}
    assert pinned.nbytes == 8 * GEOMETRY.page_bytes
    for _ in range(2):
        pinned.close()
        assert (pinning.pinned, pinned.nbytes) == ({}, 0)


def test_where_one_pool_cannot_be_pinned_none_stays_pinned() -> None:
    pinning = LimitedPinning(limit=7 * GEOMETRY.page_bytes)
    with pytest.raises(RuntimeError, match="out of memory"):
        PinnedPools(make_pools(3, 5), pinning)
    assert not pinning.pinned


def test_what_a_broken_device_does_not_let_go_of_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pinning = LimitedPinning()
    pinned = PinnedPools(make_pools(3, 5), pinning)
    pinning.refuses_to_unpin = True
    pinned.close()
    told = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert told == ["0 MiB of the host stay pinned"] * 2


def test_a_cpu_pins_nothing() -> None:
    assert make_pinning(torch.device("cpu")) is None
    pinned = PinnedPools(make_pools(3), None)
    assert pinned.nbytes == 0
    pinned.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_pins_and_lets_go() -> None:
    device = torch.device("cuda", 0)
    pools, pinning = make_pools(3, 50_000), make_pinning(device)
    assert isinstance(pinning, CudaPinning)
    pinned = PinnedPools(pools, pinning)
    assert all(pool.data.is_pinned() for pool in pools)
    with pytest.raises(RuntimeError, match="already"):
        pinning.pin(pools[0].address, pools[0].nbytes)
    pinned.close()
    assert not any(pool.data.is_pinned() for pool in pools)
