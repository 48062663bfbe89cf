"""The seeds of requests that set none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.router.admission.seeds import Seeds


def test_a_seed_follows_from_key_token_and_id(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"sixteen bytes it is\n")
    one, same = Seeds.of_file(path), Seeds(b"sixteen bytes it is")
    assert one.draw("alice", "r") == same.draw("alice", "r")
    seeds = [
        one.draw("alice", "r"),
        one.draw("bob", "r"),
        one.draw("alice", "s"),
        one.draw("alic", "er"),
        Seeds(b"another key of it").draw("alice", "r"),
        *(Seeds.of_file(None).draw("alice", "r") for _ in range(2)),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**60


@pytest.mark.parametrize("key", [b"", b" short\n", b"x" * 5000])
def test_a_key_of_no_use_is_named(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    with pytest.raises(ValueError, match=r"key: the key must have 16 to 4096 bytes"):
        Seeds.of_file(path)


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: No such file"):
        Seeds.of_file(tmp_path / "nowhere")
