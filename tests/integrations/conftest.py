"""The libraries' own objects leave the garbage collector's sight, which looking for schedulers searches each time."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _few_objects():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
