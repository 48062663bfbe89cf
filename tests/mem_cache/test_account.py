from __future__ import annotations

import numpy as np
import pytest

from kvrelay.mem_cache.account import Owner, PageAccount
from kvrelay.mem_cache.errors import ConservationError


def test_the_history_names_whose_share_of_a_batch_a_page_was():
    account = PageAccount("full", 8)
    pages = account.allocate([("first", 1), ("none", 0), ("second", 2)])
    account.move([("second", 2), ("first", 1)], pages[[1, 2, 0]], Owner.LEASE, Owner.FREE)
    for page, holder in zip(pages.tolist(), ("first", "second", "second"), strict=True):
        assert account.history(page) == f"{holder}: FREE to LEASE; {holder}: LEASE to FREE"
    assert account.by_owner[Owner.FREE] == 8


def test_a_page_that_two_free_at_once_is_found():
    account = PageAccount("full", 8)
    page = account.allocate([("first", 1)])[0]
    with pytest.raises(ConservationError, match=f"page {page} moves twice at once: first"):
        account.move(
            [("first", 1), ("second", 1)],
            np.asarray([page, page], np.int32),
            Owner.LEASE,
            Owner.FREE,
        )
    assert account.by_owner[Owner.LEASE] == 1


def test_freeing_a_page_twice_is_caught_at_once():
    account = PageAccount("full", 8)
    pages = account.allocate([("a", 2)])
    account.move([("a", 2)], pages, Owner.LEASE, Owner.FREE)
    with pytest.raises(ConservationError, match="should be owned by LEASE and is by FREE"):
        account.move([("a", 2)], pages, Owner.LEASE, Owner.FREE)


def test_no_page_is_no_page():
    account = PageAccount("full", 8)
    with pytest.raises(ConservationError, match="-1 is no page"):
        account.move([("a", 1)], np.array([-1], np.int32), Owner.LEASE, Owner.FREE)
