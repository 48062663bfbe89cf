"""The property tests of the store of files find faults: so they would find one like them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvrelay.mem_cache.storage.storage_buffers import PageBuffers
from kvrelay.mem_cache.storage.storage_files import FileStore
from kvrelay.mem_cache.storage.storage_folders import OwnFolder
from kvrelay.mem_cache.storage.storage_format import IndexRecord, StorageFormat
from kvrelay.mem_cache.storage.storage_index import IndexWriter
from kvrelay.mem_cache.storage.storage_pages import StoragePage
from tests.mem_cache.planting import Faults, wrap
from tests.mem_cache.test_storage_damage import DAMAGES, KILLS, survives_a_kill, survives_damage
from tests.pairwise import few

SEARCH = settings(
    max_examples=400, deadline=None, database=None, derandomize=True,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip

DAMAGE = Faults()
KILLED = Faults()


@DAMAGE.add
def checksum_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    def believe(original: Any, buffers: PageBuffers, block: int, page: StoragePage) -> bool:
        return buffers._format.checksum_in(buffers._headers[block].tobytes(), page) is not None

    wrap(patch, PageBuffers, "is_page", believe)


@DAMAGE.add
def key_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    def of_any_page(
        original: Any, layout: StorageFormat, header: bytes, page: StoragePage
    ) -> int | None:
        start = 8 + 4 + 4 + 32
        key, before = header[start : start + 32], header[start + 32 : start + 64]
        tokens = header[start + 84 : start + 84 + layout.token_bytes]
        checksum = original(layout, header, StoragePage(key, before, tokens, page.slot))
        return None if checksum is None else int(checksum)

    wrap(patch, StorageFormat, "checksum_in", of_any_page)


@KILLED.add
def index_before_bytes(patch: pytest.MonkeyPatch) -> None:
    def early(original: Any, store: FileStore, pages: Any, blocks: Sequence[int]) -> Any:
        records = [IndexRecord(slot, page.key, page.before) for page, slot in pages]
        store._own._index.append(records)
        return original(store, pages, blocks)

    wrap(patch, FileStore, "start_writes", early)


@KILLED.add
def reused_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """The index still names the page whose slot is being written."""

    def only_puts(original: Any, index: IndexWriter, records: Any) -> None:
        original(index, [record for record in records if record.is_there])

    wrap(patch, IndexWriter, "append", only_puts)


@KILLED.add
def end_that_is_not_whole_is_kept(patch: pytest.MonkeyPatch) -> None:
    def append_behind(original: Any, index: IndexWriter) -> Any:
        found = original(index)
        if found is not None:
            index._length = index._path.stat().st_size + 40
        return found

    wrap(patch, IndexWriter, "recover", append_behind)


@KILLED.add
def found_pages_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, OwnFolder, "_has", lambda original, folder, slot: False)


def find(root: Path, run: Callable[..., None], strategies: dict[str, Any]) -> None:
    numbers = count()

    @SEARCH
    @given(**strategies)
    def search(**drawn: Any) -> None:
        folder = root / str(next(numbers))
        run(folder, **drawn)
        shutil.rmtree(folder)

    search()


@few(1)
@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_fault_is_found_by_damage(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    DAMAGE[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (it may show anywhere)
        find(tmp_path, survives_damage, DAMAGES)


@pytest.mark.parametrize("name", sorted(KILLED))
def test_a_fault_is_found_by_kills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    KILLED[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (it may show anywhere)
        find(tmp_path, survives_a_kill, KILLS)
