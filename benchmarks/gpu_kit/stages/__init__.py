"""Stages of `benchmarks.gpu` that are no tests: each a module to be run."""
