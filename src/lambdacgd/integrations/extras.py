"""Optional dependencies: what is missing and which extra brings it."""

from __future__ import annotations

import importlib.util


def need(extra: str, *packages: str) -> None:
    """Refuse to go on without ``packages``, naming the extra that installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} is not installed. Install the extra: pip install 'lambdacgd[{extra}]'")
