"""Time and memory of a step's noise; see ``python benchmarks/noise.py --help``."""

from __future__ import annotations

from lambdacgd.noise.benchmark import main

if __name__ == "__main__":
    main()
