"""Skips what is not installed. The libraries' own objects leave the garbage collector's sight: looking for schedulers
searches it each time.
"""

from __future__ import annotations

import gc
import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_huggingface*.py", "test_accelerate.py", "test_examples.py"]


@pytest.fixture(scope="session", autouse=True)
def _few_objects():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
