"""Both sides of a hand-over that is granted, and announcements."""

from __future__ import annotations

from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.wire.hand_over import Announce, FirstToken, PageRun

NINE = (FirstToken(9),)


def granted(pages: int) -> tuple[PrefillHandOver, DecodeHandOver]:
    prefill, decode = PrefillHandOver(), DecodeHandOver(pages)
    decode.on_ask(prefill.ask())
    prefill.on_grant(decode.grant([0]))
    return prefill, decode


def granted_window(missing: tuple[int, int]) -> tuple[PrefillHandOver, DecodeHandOver]:
    """A prompt of four pages in a pool of all tokens and one with a window."""
    windowed = (False, True)
    prefill, decode = PrefillHandOver(windowed), DecodeHandOver(4, windowed)
    decode.on_ask(prefill.ask())
    prefill.on_grant(decode.grant(missing))
    return prefill, decode


def announced(
    first_page: int, page_ids: tuple[int, ...], first_tokens: tuple[FirstToken, ...] = ()
) -> Announce:
    """A pool without a window: pages from `first_page` on."""
    return Announce((PageRun(first_page, page_ids),), first_tokens)
