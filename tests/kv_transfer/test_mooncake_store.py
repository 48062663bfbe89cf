"""Pages in a Mooncake Store over TCP, with a real master and two clients."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest

from kvrelay.kv_transfer.mooncake_store import MooncakeAddress, MooncakeStore
from kvrelay.mem_cache.storage.storage_pages import StoragePage
from tests.kv_transfer.test_nixl_files import finish
from tests.mem_cache.stored_files import LAYOUT, POOL_BYTES, bytes_of, num_taken, prompt
from tests.ports import free_port

WAIT_S = 60.0
LENT_BYTES = 64 << 20
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None or find_library("ibverbs") is None,
    reason="Mooncake, or libibverbs, is not installed",
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mooncake://a.b:50051", MooncakeAddress("a.b:50051")),
        ("mooncake://[::1]:5/?protocol=rdma&device=x", MooncakeAddress("[::1]:5", "rdma", "x")),
    ],
)
def test_an_address_is_read(url: str, expected: MooncakeAddress) -> None:
    assert MooncakeAddress.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    ["mooncake://a", "mooncake:a:5", "http://a:5", "mooncake://a:5/x", "mooncake://a:5?b=c",
     "mooncake://a:5?b", "mooncake://a:x"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"mooncake|http|Port|bad query"):
        MooncakeAddress.parse(url)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a master listens."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations is not None
    program = Path(found.submodule_search_locations[0]) / "mooncake_master"
    program.chmod(0o755)
    log = tmp_path_factory.mktemp("master") / "log"
    port = free_port()
    ports = (f"--rpc_port={port}", f"--metrics_port={free_port()}")
    with log.open("w") as out:
        process = subprocess.Popen(
            [program, *ports, "--default_kv_lease_ttl=500"], stdout=out, stderr=subprocess.STDOUT
        )
    until = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait()


class Client:
    def __init__(self, master: str) -> None:
        self.memory = [np.zeros((32, nbytes), np.uint8) for nbytes in POOL_BYTES]
        address = MooncakeAddress(master)
        self.store = MooncakeStore(address, "127.0.0.1", LAYOUT, LENT_BYTES, self.memory)

    def put(self, pages: Sequence[StoragePage]) -> list[bool]:
        for page in pages:
            for pool in self.memory:
                pool[page.slot] = bytes_of(page.key, pool.shape[1])
        return self._finish(self.store.put(pages))

    def get(self, pages: Sequence[StoragePage]) -> list[bool]:
        for pool in self.memory:
            pool[:] = 0xEE
        valid = self._finish(self.store.get(pages))
        for page, came in zip(pages, valid, strict=True):
            for pool in self.memory:
                assert not came or (pool[page.slot] == bytes_of(page.key, pool.shape[1])).all()
        return valid

    def _finish(self, operation: object) -> list[bool]:
        valid = finish(operation)  # type: ignore[arg-type]
        assert not isinstance(valid, bool)
        assert not num_taken(self.store.buffers)
        return list(valid)

    def exists(self, pages: Sequence[StoragePage]) -> list[bool]:
        return list(self.store.exists([page.key for page in pages]))


@needs_mooncake
def test_what_one_client_puts_the_other_gets(master: str) -> None:
    first, second = Client(master), Client(master)
    pages = prompt(1, 5)
    assert first.exists(pages) == [False] * 5
    assert first.put(pages[:4]) == [True] * 4
    assert second.exists(pages) == [True] * 4 + [False]
    assert second.get(pages) == [True] * 4 + [False]
    assert second.put(pages) == [True] * 5, "what is there stays as it is"
    assert first.get(pages) == [True] * 5
    for client in (first, second):
        assert client.store.state().write_error == ""
        client.store.close()


@needs_mooncake
def test_what_is_forgotten_is_not_found_nor_what_continues_it(master: str) -> None:
    client, other, pages = Client(master), Client(master), prompt(2, 4)
    client.put(pages)
    assert other.get(pages) == [True] * 4, "who reads them holds them for a while"
    client.store.forget([pages[1].key])
    assert client.exists(pages) == [True, False, False, False]
    assert client.get(pages) == [True, False, False, False]
    until = time.monotonic() + WAIT_S
    while other.get(pages) != [True, False, False, False]:
        assert time.monotonic() < until, "the other one still has them"
        time.sleep(1.5)
        client.exists(pages[:1])
    for one in (client, other):
        one.store.close()


@needs_mooncake
def test_what_continues_another_clients_page_is_forgotten(master: str) -> None:
    """Though nothing that this one has put says what that page continues."""
    client, other, pages = Client(master), Client(master), prompt(7, 3)
    other.put(pages[:2])
    assert client.exists(pages) == [True, True, False]
    client.put(pages[2:])
    client.store.forget([pages[0].key])
    assert client.exists(pages) == [False, False, False]
    for one in (client, other):
        one.store.close()


@needs_mooncake
def test_what_is_forgotten_while_it_is_written_is_not_kept(master: str) -> None:
    client, pages = Client(master), prompt(3, 3)
    putting = client.store.put(pages)
    client.store.forget([page.key for page in pages[1:]])
    assert finish(putting) == [True, False, False]
    assert client.exists(pages) == [True, False, False]
    client.store.close()


@needs_mooncake
def test_another_object_under_the_name_is_a_miss(master: str) -> None:
    client, pages = Client(master), prompt(4, 2)
    forged = [StoragePage(page.key, page.before, page.tokens[::-1], page.slot) for page in pages]
    client.put(forged)
    assert client.exists(pages) == [True, True], "exists is a hint"
    assert client.get(pages) == [False, False]
    assert client.store.state().broken_pages == 2
    client.store.close()


OWNER = """
import sys
from tests.kv_transfer.test_mooncake_store import Client
from tests.mem_cache.stored_files import prompt
client = Client(sys.argv[1])
client.put(prompt(5, 3))
print("put", flush=True)
sys.stdin.read()
"""


@needs_mooncake
def test_pages_whose_owner_was_killed_are_a_miss(master: str) -> None:
    command = [sys.executable, "-c", OWNER, master]
    folder = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, text=True, stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None
        while owner.stdout.readline() != "put\n":
            assert owner.poll() is None
        client, pages = Client(master), prompt(5, 3)
        assert client.exists(pages) == [True] * 3
        owner.kill()
    assert client.get(pages) == [False] * 3
    # The master may still think that it can give that memory away: then it is an error, and told.
    more = prompt(6, 2)
    put = client.put(more)
    assert client.get(more) == put
    assert all(put) or client.store.state().write_error
    client.store.close()
