"""Measurements behind single pages of the docs: ``python -m benchmarks.NAME`` from a checkout."""
