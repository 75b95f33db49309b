"""Time and peak memory of one training step: ``python benchmarks/step.py --help``, or ``lambdacgd bench step``."""

import sys

from lambdacgd.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
