"""`python -m checks` prints a line for each break of a rule of the house; 1 if there are any."""

from __future__ import annotations

import sys
from pathlib import Path

from checks import docstrings, folders, host_waits, names
from checks.sources import read_sources

CHECKS = {
    "docstrings": docstrings.check,
    "folders": folders.check,
    "host_waits": host_waits.check,
    "names": names.check,
}


def main() -> int:
    """Run the checks that the arguments name, or all, on the current folder's tree."""
    names, paths = _split(sys.argv[1:])
    sources = read_sources(Path.cwd())
    faults = [line for name in names for line in CHECKS[name](sources)]
    faults = [line for line in faults if not paths or line.startswith(tuple(paths))]
    sys.stdout.writelines(f"{line}\n" for line in faults)
    return bool(faults)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    names = [word for word in words if word in CHECKS]
    return names or list(CHECKS), [word for word in words if word not in CHECKS]


if __name__ == "__main__":
    sys.exit(main())
