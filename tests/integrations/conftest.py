"""Skips what is not installed."""

from __future__ import annotations

import importlib.util

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_huggingface*.py", "test_accelerate.py", "test_examples.py"]
