"""The issue's goals of speed on one GPU in one run, as JSON for `results/`: the loop as users write it, and its memory.

    python -m benchmarks.h200 FOLDER [--small]

About 150 seconds on an H200. ``--small`` tries the same on any machine with models that learn nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from reproduce import bench_models, bench_step

PLAIN, PRIVATE, PADDED, VIEWS = bench_step.LOOPS
SMALL = {
    "cnn": bench_models.Case(bench_models.CNN, 4, image=32),
    "wrn-16-4": bench_models.Case(lambda: bench_models.WideResNet(10, 1), 4, image=8),
    "bert-base": bench_models.Case(lambda: bench_models.Bert(16, 2, 2, vocabulary=50), 4, tokens=4, vocabulary=50),
    "vit-b": bench_models.Case(lambda: bench_models.ViT(16, 2, 2, image=32), 4, image=32),
    "gpt2": bench_models.Case(lambda: bench_models.gpt2(16, 2, 2, vocabulary=50), 4, tokens=6, vocabulary=50),
    "llama-lora": bench_models.Case(
        lambda: bench_models.llama_with_lora(16, 2, 2, vocabulary=50, hidden=24), 4, tokens=6, vocabulary=50
    ),
}


def main(folder: Path, *, small: bool) -> None:
    """Measure, the shortest first: what has been written stays if time runs out."""
    import torch

    if small:
        bench_step.CASES.update(SMALL)
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    many, few = ((5, 3), (3, 3)) if small else ((55, 30), (34, 18))
    three, two = [PLAIN, PRIVATE, PADDED], [PLAIN, PRIVATE]
    for name, models, precision, modes, (warm_up, repeats) in (
        ("loop-h200-tf32", ["cnn", "wrn-16-4"], "tf32", three, many),
        ("loop-h200-bf16", ["bert-base", "vit-b"], "bf16", three, many),
        ("views-h200", ["vit-b"], "bf16", [PRIVATE, VIEWS], (8, 3)),
        ("loop-h200-lm", ["gpt2", "llama-lora"], "bf16", two, few),
    ):
        out = folder / f"{name}.json"
        bench_step.run(
            models, precisions=[precision], modes=modes, device=device, warm_up=warm_up, repeats=repeats, out=out
        )
        print(f"{name}: done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), small="--small" in sys.argv)
