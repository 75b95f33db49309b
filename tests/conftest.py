"""What CI shows, a desk repeats: keys, run ids and seeds draw the same every time. The cache is the tests' own."""

from __future__ import annotations

import os
import random
import re
import secrets

import pytest
from hypothesis import HealthCheck, settings

# Before NumPy and torch load: the accountants' products are small, and on a busy machine BLAS threads that waited for
# each other took thirty times the CPU seconds of one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# These machines are shared: a slow example is not a failure.
settings.register_profile("lambdacgd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lambdacgd")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LAMBDACGD_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("LAMBDACGD_STATE", "off")  # tests resume copies of one run on purpose; tests/test_ledger.py has it on
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def repeatable(request, monkeypatch):
    """The test's name is the seed. Processes that a test starts draw as a user's do."""
    draw = random.Random(request.node.nodeid)
    monkeypatch.setattr(secrets, "token_bytes", lambda n=32: draw.randbytes(n))
    monkeypatch.setattr(secrets, "token_hex", lambda n=32: draw.randbytes(n).hex())
    monkeypatch.setattr(secrets, "randbits", draw.getrandbits)


@pytest.fixture
def sentence(request):
    """What the error of a fault says (``tests/faults.py``), as a pattern: the page of faults promises it."""
    return re.escape(request.node.get_closest_marker("fault").kwargs["says"])
