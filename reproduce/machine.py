"""Where and with what a number was measured."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("lambdacgd", "torch", "numpy", "scipy", "dp-accounting", "triton", "transformers", "opacus")


@cache
def machine() -> dict[str, Any]:
    """Device, system and versions; says CUDA's name only where torch is in use, since asking takes seconds."""
    from lambdacgd.version import __version__

    versions: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["lambdacgd"] = __version__
    return {"device": _device(), "cores": os.cpu_count(), "system": platform.platform(), "versions": versions}


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
