"""Measurements of a running cluster, from outside: run from the repository root with ``-m``."""
