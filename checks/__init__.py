"""The rules of the house that no linter knows: `python -m checks`, a part of `make check`."""
