"""A step's regenerated noise in this tree beside that of another: ``python -m benchmarks.noise_formats --beside DIR``.

``DIR`` holds another version of the package, say format 1 of the noise:

    mkdir -p .format1 && git archive 80230d3 src/lambdacgd | tar -x -C .format1

Both run in one process, round by round in turn, on the same sums; host work is included. On a CPU, CPU time is
measured. With ``--variants`` the kernel is also launched with other register limits and other numbers of groups a
program.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


class Tree:
    """One version of the package. Both are called ``lambdacgd``, so only one at a time stands in ``sys.modules``."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)
        self.modules: dict[str, ModuleType] = {}

    def __enter__(self) -> Tree:
        for name in [name for name in sys.modules if name.split(".")[0] == "lambdacgd"]:
            del sys.modules[name]
        sys.modules.update(self.modules)
        sys.path.insert(0, self.source)
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self.source)
        self.modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "lambdacgd"}

    def step(self, sums: dict[str, torch.Tensor], coefficients: tuple[float, ...]) -> Callable[[int], None]:
        with self:
            from lambdacgd.keys import SecretKey
            from lambdacgd.mechanisms.base import BandedInverse
            from lambdacgd.noise import Layout, NoiseField, RegeneratedNoise

            layout = Layout.of({name: tuple(value.shape) for name, value in sums.items()})
            field = NoiseField(SecretKey.generate(), layout, run_id="benchmark")
            noise = RegeneratedNoise(field, BandedInverse(coefficients), sigma=1e-3, clip=1.0, horizon=1 << 40)

        def run(calls: int, steps: Any = iter(range(20, 1 << 40))) -> None:  # noqa: B008
            with self:
                for _ in range(calls):
                    noise.add_(sums, next(steps), check=False)

        return run


def milliseconds(contenders: dict[str, Callable[[int], None]], cuda: bool, rounds: int) -> dict[str, float]:
    """Median time a step of each contender; all of them run one round after the other, ``rounds`` times."""
    clock = time.perf_counter if cuda else time.process_time

    def timed(run: Callable[[int], None], calls: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        started = clock()
        run(calls)
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (clock() - started) / calls

    for run in contenders.values():
        timed(run, 2)  # compiles
    calls = max(1, min(50, int(15 / max(timed(run, 2) for run in contenders.values()))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(timed(run, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def variants(tree: Tree, make: Callable[[], Callable[[int], None]]) -> dict[str, Callable[[int], None]]:
    """Steps of this tree whose launches have other options, by name."""
    with tree:
        from lambdacgd.noise import cuda, kernel

        plain = kernel.noise_kernel

    class Launcher:
        def __init__(self, options: dict[str, Any]) -> None:
            self.options = options

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return functools.partial(plain[grid], **self.options)

    usual = cuda.turns_of

    def with_options(turns: int, options: dict[str, Any]) -> Callable[[int], None]:
        inner = make()

        def run(calls: int) -> None:
            # The table is made at the first call, with this variant's turns; the launch itself takes the options.
            kernel.noise_kernel, cuda.turns_of = Launcher(options), lambda jobs: turns
            inner(calls)
            kernel.noise_kernel, cuda.turns_of = plain, usual

        return run

    found = {f"turns {turns}": with_options(turns, {}) for turns in (1, 2, 4, 8)}
    for limit in (128, 112, 96):
        found |= {f"turns {t}, {limit} registers": with_options(t, {"maxnreg": limit}) for t in (1, 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="the other tree, with src/lambdacgd in it")
    parser.add_argument("--models", default="cnn,vit-b,bert-base,vit-h")
    parser.add_argument("--bands", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", help="models for which other launch options are measured too, with 2 bands")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from reproduce.bench_noise import coefficients, shapes_of
    from reproduce.framework import measured_on

    cuda = options.device == "cuda"
    trees = {"this tree": Tree(ROOT / "src")}
    if options.beside:
        trees = {"beside": Tree(options.beside / "src")} | trees
    what = "ms a step's regenerated noise" + (", host work included" if cuda else ", CPU time")
    result: dict[str, Any] = {"what": what, **measured_on(), "ms": {}, "ratio": {}, "variants": {}}
    for model in options.models.split(","):
        sums = {name: torch.randn(shape, device=options.device) for name, shape in shapes_of(model).items()}
        for bands in map(int, options.bands.split(",")):
            at = f"{model} {bands}"
            steps = {name: tree.step(sums, coefficients(bands)) for name, tree in trees.items()}
            result["ms"][at] = times = milliseconds(steps, cuda, options.rounds)
            if options.beside:
                result["ratio"][at] = round(times["this tree"] / times["beside"], 3)
            print(at, {k: round(v, 4) for k, v in times.items()}, result["ratio"].get(at), flush=True)
        if options.variants and model in options.variants.split(","):
            tree = trees["this tree"]
            found = variants(tree, functools.partial(tree.step, sums, coefficients(2)))
            result["variants"][model] = times = milliseconds(found, cuda, options.rounds)
            print(model, "2 bands", {k: round(v, 4) for k, v in times.items()}, flush=True)
        del sums
        if cuda:
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
