"""Request traces: arrival time and lengths, from the public Azure and Mooncake files."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

# Tokens that one of a Mooncake row's hash_ids stands for.
BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace file that cannot be read, with the line at fault."""


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace."""

    at: float  # seconds, from an origin of the trace's own
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's 512-token blocks, where the trace has them


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Return the first `limit` rows of an Azure `.csv` or Mooncake `.jsonl` file, plain or gzip.

    Raises ``TraceError`` for anything else.
    """
    reader = _reader_of(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(islice(reader(file, path), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    return rows


def _reader_of(path: Path) -> Callable[[TextIO, Path], Iterator[TraceRow]]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        return _azure_rows
    if name.endswith(".jsonl"):
        return _mooncake_rows
    raise TraceError(f"{path}: neither .csv (Azure) nor .jsonl (Mooncake), plain or .gz")


def _azure_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    lines = csv.DictReader(file)
    for fields in lines:
        try:
            yield _checked(
                TraceRow(
                    datetime.fromisoformat(fields["TIMESTAMP"]).timestamp(),
                    int(fields["ContextTokens"]),
                    int(fields["GeneratedTokens"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {lines.line_num}: {_reason(error)}") from error


def _mooncake_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(file, start=1):
        try:
            fields = json.loads(line)
            yield _checked(
                TraceRow(
                    float(fields["timestamp"]) / 1000,
                    int(fields["input_length"]),
                    int(fields["output_length"]),
                    tuple(int(block) for block in fields.get("hash_ids", ())),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: {_reason(error)}") from error


def _checked(row: TraceRow) -> TraceRow:
    if min(row.input_len, row.output_len) < 1:
        raise ValueError(f"lengths must be at least 1, not {row.input_len} and {row.output_len}")
    if row.blocks and (min(row.blocks) < 0 or len(row.blocks) * BLOCK_TOKENS < row.input_len):
        raise ValueError(f"hash_ids do not cover {row.input_len} tokens")
    return row


def _reason(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else str(error)
