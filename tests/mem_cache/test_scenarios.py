"""Where each of the memory scenarios that broke other engines is tested, by number.

A test that plays scenario 9 is named ``test_scenario_9_...``: search for it. A
scenario of memory alone is in `tests/mem_cache`, in the file that the table
names; one that needs schedulers, transfers or a cluster is in the test folder
that it names. After every one nobody has anything but what the prefix index
may evict, and every page and row can be had again.

| no. | what went wrong elsewhere | tested in |
| --- | --- | --- |
| 1 | p=1, L=4, 3 new tokens, overlap, a pool of 7: the delayed step's slot | test_lengths.py |
| 2 | L=4, two outputs: C=A is 6 with overlap, 5 without | test_lengths.py |
| 3 | what a release keeps, what it frees, and that nothing leaks unpublished | test_lengths.py |
| 4 | a stop string matches two tokens before the last committed one | test_lengths.py |
| 5 | the extra slot of the next step, in a batch of chunks and decodes | test_lengths.py, engine |
| 6 | end of sequence with a window: the last slot is released too | test_windows.py |
| 7 | a chunked request keeps its row and table while others come and go | test_rows.py, engine |
| 8 | pages and row of a finished request that forward N+1 still reads | test_rows.py, engine |
| 9 | a chunked prefill is aborted, its forward ends later | test_rows.py, engine |
| 10 | drain while a finished prefill is not merged yet | engine |
| 11 | a session's first turn: P is 8, not 14 | test_sessions.py |
| 12 | another publishes the same tokens between two chunks | test_prefix_sharing.py |
| 13 | what a resumed session frees of its tail, p=1 | test_sessions.py, engine, cluster |
| 14 | the same, p=16 and p=256 | test_sessions.py, engine, cluster |
| 15 | the same, with a prefix that ends inside a page | test_sessions.py, engine, cluster |
| 16 | the same, cut to fewer outputs than were committed | test_sessions.py, engine, cluster |
| 17 | admission refuses twice after a restore | test_sessions.py, engine, cluster |
| 18 | a first turn, a later turn is aborted | test_sessions.py, engine, cluster |
| 19 | a second turn is cancelled while the first runs | test_sessions.py, engine, cluster |
| 20 | a session is closed while its turn decodes | test_sessions.py, engine, cluster |
| 21 | a lent session is counted once | test_sessions.py, engine, cluster |
| 22 | rejected drafts on a page boundary | test_speculation.py, engine, cluster |
| 23 | a draft path grows a request: A moves in the same call | test_speculation.py, engine |
| 24 | C never exceeds A | test_lengths.py, engine |
| 25 | the reserve shrinks under a forward in flight | test_speculation.py, engine |
| 26 | a budget without the page of margin | test_windows.py |
| 27 | a deferred chunk moves on | test_windows.py |
| 28 | one pool grants, the other refuses | test_windows.py |
| 29 | a page is reused after it left a window | test_windows.py |
| 30 | the frontier never empties a leaf | test_windows.py |
| 31 | pulls in progress hold pages while the running batch needs some | engine |
| 32 | abort after the pull and before admission, or while retracted | engine |
| 33 | abort on the prefill side: waiting, between chunks, after the last announcement | engine |
| 34 | abort while a transfer into the pages runs | engine, cluster |
| 35 | one of several transfers fails while another runs | engine |
| 36 | no page travels, the first token does | engine |
| 37 | the index changes after a request was planned | test_prefix_sharing.py |
| 38 | a prompt that fits the prefill worker but not the decode worker | engine |
| 39 | the pages announced are exactly those needed, none twice | kv_transfer, engine |
| 40 | a worker restarts while the other side holds its old agent | kv_transfer |
| 41 | the message that ends a hand-over is lost | engine |
| 42 | ids `1` and `10`: aborting one leaves the other alone | engine |
| 43 | scheduler and prefetch finish with the same host pages | there is no host tier |
| 44 | a prefetch into host pages fails or is aborted | there is no host tier |
| 45 | a late completion of an operation on host pages | there is no host tier |
| 46 | no token is sampled from a chunk but the last | engine |
| 47 | forced retracts with chunks and no prefix index | engine |
| 48 | room for one and a half prompts, two arrive | engine |
| 49 | a duplicate that a peer or a forward still reads | test_prefix_sharing.py, test_windows.py |
| 50 | eviction of what a forward still reads or writes | test_prefix_sharing.py, test_windows.py |
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAME = re.compile(r"def test_scenario_((?:\d+_)+)(?:to_(\d+)_)?")
ROW = re.compile(r"^\| (\d+) \| .* \| (.*) \|$", re.MULTILINE)
NOWHERE = "there is no host tier"


def where_tested() -> dict[int, set[str]]:
    """For each scenario the files of this folder, and the other folders, with tests of it."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        place = path.relative_to(TESTS)
        name = place.name if place.parts[0] == "mem_cache" else place.parts[0]
        for numbers, last in NAME.findall(path.read_text()):
            several = [int(number) for number in numbers.split("_") if number]
            for number in [*several, *range(several[-1], int(last or 0) + 1)]:
                found[number].add(name)
    return found


def test_every_scenario_is_in_the_table_and_tested_where_it_says():
    table = {int(number): set(where.split(", ")) for number, where in ROW.findall(__doc__ or "")}
    assert list(table) == list(range(1, 51))
    tested = where_tested()
    assert tested.keys() <= table.keys()
    for number, where in table.items():
        assert where == (tested.get(number) or {NOWHERE}), f"scenario {number}"
