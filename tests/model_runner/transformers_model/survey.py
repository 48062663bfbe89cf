"""`python -m tests.model_runner.transformers_model.survey`: writes docs/models.json anew.

With names of kinds it prints what it finds of these.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

from tests.model_runner.transformers_model.kinds import all_kinds, find, write_results


def main() -> None:
    warnings.filterwarnings("ignore")
    wanted = sys.argv[1:]
    found = []
    for kind in wanted or all_kinds():
        with tempfile.TemporaryDirectory() as folder:
            found.append(find(kind, Path(folder)))
        sys.stdout.write(f"{found[-1]}\n")
        sys.stdout.flush()
    if not wanted:
        write_results(found)


if __name__ == "__main__":
    main()
