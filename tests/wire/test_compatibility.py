"""What `make check` finds when messages change, against the committed baseline."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"
BUF = shutil.which("buf", path=sysconfig.get_path("scripts"))

pytestmark = pytest.mark.skipif(BUF is None, reason="buf-bin is not installed")


def breaks(changed: Path) -> str:
    """What of the baseline the changed messages break; empty if nothing."""
    assert BUF is not None
    command = [BUF, "breaking", str(changed), "--against", str(PROTO / "baseline.binpb")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not ran.stderr
    assert bool(ran.stdout) == (ran.returncode != 0)
    return ran.stdout


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("uint32 attempt = 2;", "uint32 attempt = 2;\n  string more = 900;", ""),
        ("repeated uint32 token_ids = 4 [packed = true];", "", "NextTokens"),
        ("repeated uint32 indexes = 3", "repeated uint32 indexes = 30", "NextTokens"),
        ("uint32 num_pages = 2;", "uint64 num_pages = 2;", "num_pages"),
        ("string owner = 3;", 'reserved 3;\n  reserved "owner";', "owner"),
    ],
    ids=["added", "removed", "renumbered", "another type", "removed and reserved"],
)
def test_a_change_that_breaks_messages_is_found(
    tmp_path: Path, before: str, after: str, found: str
) -> None:
    changed = shutil.copytree(PROTO, tmp_path / "proto")
    file = changed / "kvrelay/v1/worker.proto"
    text, count = re.subn(re.escape(before), after, file.read_text(), count=1)
    assert count == 1
    file.write_text(text)
    assert re.search(found, said := breaks(changed))
    assert bool(said) == bool(found)
