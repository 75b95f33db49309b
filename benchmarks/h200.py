"""What is measured on an H200, in one process, as JSON for `results/`.

    python -m benchmarks.h200 FOLDER captured noise pair step runtime [--small]
    python -m benchmarks.h200 FOLDER loops [--small]

The first is what README and the pages say of times, about 230 seconds; `loops`, about 150, is the loop as users write
it, and its memory. ``--small`` tries the same on any machine with models that learn nothing, but for `captured`, which
is CUDA graphs.
"""

from __future__ import annotations

import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch

from reproduce import bench_models, bench_noise, bench_step, framework, runtime

PLAIN, PRIVATE, PADDED, VIEWS = bench_step.LOOPS
TABLE = ["non-private", "opacus-hooks", "opacus-ghost", "lambda-cgd"]
WIDE = bench_models.Case(lambda: bench_models.WideResNet(10, 1), 4, image=8)
BERT = bench_models.Case(lambda: bench_models.Bert(16, 2, 2, vocabulary=50), 4, tokens=4, vocabulary=50)
LSTM = bench_models.Case(partial(bench_models.LSTMClassifier, 50, 8, 8), 4, tokens=4, vocabulary=50)
VIT = bench_models.Case(lambda: bench_models.ViT(16, 2, 2, image=32), 4, image=32)
SMALL = {
    "cnn": bench_models.Case(bench_models.CNN, 4, image=32),
    "wrn-16-4": WIDE, "wrn-40-4": WIDE, "vit-b": VIT, "vit-h": VIT, "bert-tiny": BERT, "bert-base": BERT, "lstm": LSTM,
    "gpt2": bench_models.Case(lambda: bench_models.gpt2(16, 2, 2, vocabulary=50), 4, tokens=6, vocabulary=50),
    "llama-lora": bench_models.Case(
        lambda: bench_models.llama_with_lora(16, 2, 2, vocabulary=50, hidden=24), 4, tokens=6, vocabulary=50
    ),
}  # fmt: skip
PARTS = ("captured", "noise", "pair", "step", "runtime", "loops")


def measure(part: str, folder: Path, device: str, *, small: bool) -> None:
    """One part; what it has written stays if time runs out."""
    if part == "captured" and not small:  # before all others: it tells what the first run of a process takes
        bench_step.run_captured(out=folder / "captured-h200.json")
    elif part == "noise":
        models = ["cnn", "vit-b", "vit-h", "bert-base", bench_noise.FLAT, "wrn-40-4", "bert-tiny"]
        out, seconds = folder / "noise-h200.json", 0.01 if small else 0.2
        bench_noise.run(models, device, bands=(2, 16), seconds=seconds, buffer_gib=2.4, out=out, show=False)
    elif part == "pair":
        models = ["vit-b", "bert-base", "cnn", "vit-h", "bert-tiny", "lstm"]
        out = folder / "pair-h200.json"
        bench_step.run_pair(models, precisions=["tf32"], device=device, rounds=9, out=out)
    elif part == "step":
        for precision, models in (
            ("tf32", ["cnn", "vit-b", "bert-base", "wrn-40-4", "bert-tiny", "lstm"]),
            ("bf16", ["vit-b", "bert-base"]),
        ):
            out = folder / f"step-h200-{precision}.json"
            bench_step.run(models, precisions=[precision], modes=TABLE, device=device, warm_up=3, repeats=9, out=out)
    elif part == "runtime":
        for name, seconds in (("runtime-imdb", 30.0), ("runtime-cifar", 20.0)):
            settings = framework.Settings(device=device, quick=small)
            framework.reproduce(framework.load(name), folder / name, settings=settings, stop_after=seconds)
    elif part == "loops":
        loops(folder, device, small=small)


def loops(folder: Path, device: str, *, small: bool) -> None:
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


def main(folder: Path, parts: list[str], *, small: bool) -> None:
    """The parts in the order given, in each what is claimed first."""
    bench_step.check_names(part=(parts, PARTS))
    if small:
        bench_step.CASES.update(SMALL)
        runtime.MODELS.update(SMALL)
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    for part in parts:
        try:
            measure(part, folder, device, small=small)
        except Exception:  # one part that fails must not lose the rest
            traceback.print_exc()
        print(f"{part}: ended after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "--small"], small="--small" in sys.argv)
