"""Time and memory of a step's noise: ``python benchmarks/noise.py --help``, or ``lambdacgd bench noise``."""

import sys

from lambdacgd.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "noise", *sys.argv[1:]]))
