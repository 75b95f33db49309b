"""Time and peak memory of one training step: non-private, Opacus, and ours, in one run.

python benchmarks/step.py --models vit-b,bert-base --precision tf32,bf16 --device cuda --out results/step.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lambdacgd.clipping.benchmark import MODES, run
from lambdacgd.clipping.benchmark_models import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES), help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated: {', '.join(MODES)}")
    parser.add_argument("--precision", default="tf32,bf16", help="comma-separated: fp32, tf32, bf16 (autocast)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="examples in a batch (default: each model's own)")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write JSON here, after every cell")
    a = parser.parse_args()
    run(
        a.models.split(","),
        precisions=a.precision.split(","),
        modes=a.modes.split(","),
        device=a.device,
        warm_up=a.warm_up,
        repeats=a.repeats,
        batch=a.batch,
        out=a.out,
    )


if __name__ == "__main__":
    main()
