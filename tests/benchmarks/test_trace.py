from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from kvrelay.deploy.load_generator.trace import BLOCK_TOKENS, TraceError, TraceRow, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2500, "input_length": 10, "output_length": 7, "hash_ids": [0]}\n'
)


def write(path: Path, text: str) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_azure_rows(tmp_path, name):
    first, second = read_trace(write(tmp_path / name, AZURE))
    assert (first.input_len, first.output_len) == (374, 44)
    assert (second.input_len, second.output_len) == (396, 109)
    assert second.at - first.at == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz"])
def test_mooncake_rows(tmp_path, name):
    assert read_trace(write(tmp_path / name, MOONCAKE)) == [
        TraceRow(0.0, 600, 5, (0, 1)),
        TraceRow(2.5, 10, 7, (0,)),
    ]


def test_the_limit_leaves_the_rest_unread(tmp_path):
    path = write(tmp_path / "m.jsonl", MOONCAKE + "not json\n")
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:51,many,1\n", "line 4"),
        ("a.csv", AZURE + "2023-11-16 18:15:51\n", "line 4"),
        ("a.csv", AZURE + "yesterday,1,1\n", "line 4"),
        ("a.csv", "time,in,out\n1,2,3\n", "no field 'TIMESTAMP'"),
        ("a.csv", AZURE + "2023-11-16 18:15:51,5,0\n", "at least 1"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("m.jsonl", MOONCAKE + "{", "line 3"),
        ("m.jsonl", MOONCAKE + "[]\n", "line 3"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5}\n', "no field 'output_length'"),
        ("m.jsonl", MOONCAKE.replace("[0, 1]", "[0]"), "do not cover 600"),
        ("m.jsonl", "", "no requests"),
        ("trace.parquet", "", "neither"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, name, text, complaint):
    with pytest.raises(TraceError, match=complaint):
        read_trace(write(tmp_path / name, text))


def test_a_file_that_is_not_gzip_is_refused(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_text(AZURE)
    with pytest.raises(TraceError, match="gzip"):
        read_trace(path)


def public_trace(name: str) -> Path:
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("KVRELAY_TEST_DATA", root.parent / "shared" / "data"))
    path = folder / "traces" / name
    if not path.is_file():
        pytest.skip(f"the public trace {name} is not there; KVRELAY_TEST_DATA names its folder")
    return path


def test_the_public_azure_trace():
    rows = read_trace(public_trace("azure_2023_conv.csv.gz"))
    assert len(rows) == 19_366
    assert max(row.input_len for row in rows) == 14_050


def test_the_public_mooncake_trace():
    rows = read_trace(public_trace("mooncake_conversation_trace.jsonl.gz"))
    assert len(rows) == 12_031
    assert all(len(row.blocks) * BLOCK_TOKENS >= row.input_len for row in rows)
