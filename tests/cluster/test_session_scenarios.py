"""Scenarios of sessions' tails on real workers, by number: a real model, real pages, over gRPC.

What a turn is lent is watched on the worker's own engine thread; its tokens are compared with those
of the whole conversation as a request of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.mem_cache.leases.lease import Lease
from tests.cluster.in_process import InProcess, in_process
from tests.cluster.test_sessions import SAMPLING, Chat, resumed, some_tokens
from tests.pairwise import few

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}
ALONE: dict[str, Any] = {"prefill": 0, "decode": 0, "aggregated": 1, "prefix_index": "none"}


class Lent(NamedTuple):
    """A session's lease as a turn got it, before it has written anything."""

    kept_before: int
    """Pages that the session had."""
    pages: Sequence[int]
    freed: Sequence[int]
    """Pages that it had, and the turn has not."""
    committed: int
    allocated: int


def watch_borrowing(cluster: InProcess) -> list[Lent]:
    """What every later turn is lent by the last worker."""
    kv_cache = cluster.hosted[-1]._parts.kv_cache
    leases, lent = kv_cache.leases, list[Lent]()
    borrow = leases.borrow

    def watched(lease: Lease, *args: Any, **options: Any) -> bool:
        before = lease.pages().tolist()
        if not borrow(lease, *args, **options):
            return False
        after = lease.pages().tolist()
        freed = [page for page in before if page not in after]
        lengths = (lease.kv_committed_len, lease.kv_allocated_len)
        lent.append(Lent(len(before), after, freed, *lengths))
        return True

    leases.borrow = watched  # type: ignore[method-assign]
    return lent


@few(2)
@pytest.mark.parametrize(("page_size", "kept", "prefix", "freed"), [
    pytest.param(1, 48, 39, 9, id="13"),
    pytest.param(16, 48, 39, 0, id="14-p16"),
    pytest.param(16, 56, 39, 1, id="14-p16-A56"),
    pytest.param(256, 56, 39, 0, id="14-p256"),
    pytest.param(4, 20, 13, 1, id="15"),
])  # fmt: skip
async def test_scenario_13_to_15_a_rewound_turn_frees_the_tail_before_it_writes(
    tiny: Path, page_size: int, kept: int, prefix: int, freed: int
) -> None:
    """The unaligned page stays: it holds tokens that are kept."""
    async with in_process(tiny, page_size=page_size, kv_memory=8 << 20, **ALONE) as cluster:
        lent = watch_borrowing(cluster)
        chat = await Chat(cluster, "chat").open()
        first = some_tokens(1, 12)
        await chat.say(first, max_tokens=kept + 1 - len(first))
        await chat.say([5, 6, 7], rewind_to=prefix)
        [turn] = lent
        assert turn.kept_before == -(-kept // page_size)
        assert len(turn.freed) == freed
        assert len(turn.pages) == -(-prefix // page_size)
        assert turn.committed == prefix
        await chat.say(some_tokens(2, 9))
        assert await resumed(cluster) == 2
        await chat.close()
        await cluster.assert_at_baseline()


async def ends_at(cluster: InProcess, prompt: list[int], outputs: int) -> list[int] | None:
    """So many tokens that a prompt leads to, of which the last is new; None if it is not."""
    sampling = {**SAMPLING, **GREEDY, "max_tokens": outputs}
    tokens = (await cluster.generate(prompt, **sampling)).tokens
    return tokens if tokens.index(tokens[-1]) == outputs - 1 else None


@few(1)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
async def test_scenario_16_outputs_that_a_stop_cut_off_are_freed(tiny: Path, overlap: bool) -> None:
    """26 tokens of a prompt, 12 of its output kept: what drafts had beyond those is freed."""
    async with in_process(
        tiny,
        page_size=1,
        kv_memory=8 << 20,
        speculation=Speculation.NGRAM,
        overlap=overlap,
        **ALONE,
    ) as cluster:
        lent, surplus = watch_borrowing(cluster), 0
        for number in range(40):
            # Its beginning comes again: there is something to guess from.
            prompt = [*some_tokens(number, 13), *some_tokens(number, 13)]
            output = await ends_at(cluster, prompt, 12)
            if output is None:
                continue
            chat = await Chat(cluster, f"chat {number}").open()
            complete = await chat.say(prompt, max_tokens=40, stop_token_ids=[output[-1]], **GREEDY)
            assert complete.usage.completion_tokens == 12
            await chat.say([5], max_tokens=3, **GREEDY)
            shared = len(prompt) + 12 - 1
            assert (lent[-1].committed, lent[-1].allocated) == (shared, shared)
            assert len(lent[-1].pages) == shared
            surplus += len(lent[-1].freed)
            await chat.close()
            if surplus and len(lent) >= 2:
                break
        assert surplus, "nothing was allocated beyond what was kept"
        await cluster.assert_at_baseline()


@few(1)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
async def test_scenario_22_accepted_drafts_at_a_page_boundary_stay(
    tiny: Path, overlap: bool
) -> None:
    """Five drafted: turns of all lengths end, and go on, on both sides of a boundary."""
    async with in_process(
        tiny,
        page_size=4,
        kv_memory=8 << 20,
        speculation=Speculation.NGRAM,
        num_draft_tokens=5,
        overlap=overlap,
        **ALONE,
    ) as cluster:
        lent = watch_borrowing(cluster)
        chat = await Chat(cluster, "chat").open()
        await chat.say([*some_tokens(3, 9), *some_tokens(3, 9)], max_tokens=24, **GREEDY)
        for number, length in enumerate((3, 2, 1, 2, 4)):
            await chat.say(some_tokens(number, length), max_tokens=20, **GREEDY)
        drafted = await cluster.metric("kvrelay_draft_tokens_total")
        accepted = await cluster.metric("kvrelay_accepted_draft_tokens_total")
        assert 0 < accepted < drafted
        assert await resumed(cluster) == len(lent) == 5
        assert {turn.committed % 4 for turn in lent} == {0, 1, 2, 3}
        await chat.close()
        await cluster.assert_at_baseline()
