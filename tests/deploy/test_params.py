from __future__ import annotations

import socket

import pytest

from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        (" 1.5 gib ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "12 parsecs", "0x10", "1,5GiB", "٣"])
def test_what_is_no_size_is_named(text: str):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1 << 10, 512 << 20, 3 << 29, 10**9])
def test_a_size_that_is_written_reads_the_same(size: int):
    assert parse_size(format_size(size)) == size


def test_a_size_is_written_in_its_largest_whole_unit():
    assert format_size(512 << 20) == "512MiB"
    assert format_size(3 << 29) == "1536MiB"
    assert format_size(1000) == "1000"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("localhost:0", "localhost", 0),
        ("[::1]:9400", "::1", 9400),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, host: str, port: int):
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", ":50051", "host:", "host:x", "host:-1", "host:65536", "::1:50051"]
)
def test_what_is_no_address_is_named(text: str):
    with pytest.raises(ValueError, match=r"host:port|the port|in brackets"):
        Address.parse(text)


def test_only_loopback_stays_on_the_machine():
    inside = ("127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1")
    outside = ("0.0.0.0:1", "[::]:1", "192.0.2.7:1", "example.org:1")
    assert all(Address.parse(text).is_loopback for text in inside)
    assert not any(Address.parse(text).is_loopback for text in outside)


def test_a_port_in_use_is_found_and_named(no_release: None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = Address("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(DeployError, match=f"--grpc: cannot listen on {taken}: .*in use"):
            taken.check_free("--grpc")
    taken.check_free("--grpc")
