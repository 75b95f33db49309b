"""The two runtime tables in one go, within a time budget: IMDb's, then CIFAR-10's, small models first.

    python benchmarks/runtime.py --out DIR [--budget 300] [--quick] [--device cuda]

Finished models are kept under DIR; running it again goes on with the rest. Needs no matplotlib: bring the folders home
and draw with ``lambdacgd reproduce runtime-cifar --collect --device cuda --out DIR``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lambdacgd.experiments.framework import Settings, load, reproduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no new model is begun")
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    settings = Settings(quick=options.quick, device=options.device)
    began = time.monotonic()
    for name in ("runtime-imdb", "runtime-cifar"):
        left = options.budget - (time.monotonic() - began)
        if not reproduce(load(name), options.out / name, settings=settings, stop_after=left):
            print(f"no time left for {name}")
            continue
        print((options.out / name / f"{name}.md").read_text(), flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
