"""One folder of cached results for a test run, apart from the user's own; hypothesis without deadlines."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# These machines are shared: a slow example is not a failure. Derandomised, so that CI repeats what a desk showed.
settings.register_profile("lambdacgd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lambdacgd")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LAMBDACGD_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
