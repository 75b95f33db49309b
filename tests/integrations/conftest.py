"""Skips what is not installed, and keeps the garbage collector from walking through all libraries after each run."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest

if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_huggingface*.py", "test_accelerate.py", "test_examples.py"]


@pytest.fixture(scope="session", autouse=True)
def _imported_objects_are_no_garbage() -> Iterator[None]:
    """Accelerate and Lightning collect garbage whenever a run ends, which takes a second where much is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
