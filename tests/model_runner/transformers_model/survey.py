"""`python -m tests.model_runner.transformers_model.survey`: writes docs/models.json.

Arguments are the kinds whose rows are found anew; without any it is all of them.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

from tests.model_runner.transformers_model.kinds import (
    all_kinds,
    find,
    read_results,
    write_results,
)


def main() -> None:
    warnings.filterwarnings("ignore")
    wanted = sys.argv[1:]
    found = []
    for kind in wanted or all_kinds():
        with tempfile.TemporaryDirectory() as folder:
            found.append(find(kind, Path(folder)))
        sys.stdout.write(f"{found[-1]}\n")
        sys.stdout.flush()
    known = read_results() if wanted else {}
    write_results(list((known | {one.kind: one for one in found}).values()))


if __name__ == "__main__":
    main()
