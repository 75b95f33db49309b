"""What noise and steps cost at any size, fitted to measurements: ``python benchmarks/footprint.py`` writes
``src/lambdacgd/footprint_data.py`` from ``results/noise-h200.json`` and ``results/step-h200*.json``.

Noise is fitted on models of at least 80M parameters, where launches no longer matter: regenerated
t = launch + d(a + c·p), buffered t = e·tensors + d(a + c·p), for d parameters and p bands, by least squares of
relative errors with coefficients of at least zero. Steps are fitted by one number a precision: time per parameter and
token of the largest transformers measured, noise taken out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parent.parent
NOISE, STEPS = "results/noise-h200.json", ("results/step-h200.json", "results/step-h200-host-bound.json")
TARGET = ROOT / "src" / "lambdacgd" / "footprint_data.py"
LARGE = 80_000_000
TOKENS = {"vit-b": 197, "vit-l": 197, "bert-base": 256, "bert-large": 256}
# bfloat16 steps of BERT-base were bound by the host, so they say little about larger models.
STEP_MODELS = {"tf32": ("vit-l", "bert-large"), "bf16": ("vit-b",)}


def fit_noise(models: dict[str, Any], prefix: str) -> dict[str, float]:
    """Coefficients of one way to make noise, and its worst relative error on the models it was fitted to."""
    rows, times, memory = [], [], []
    regenerated = prefix == "regenerated"
    for model in models.values():
        d = model["parameters"]
        if d < LARGE:
            continue
        for name, cell in model["contenders"].items():
            if not name.startswith(prefix):
                continue
            bands = 1 if "DP-SGD" in name else int(name.split(", ")[1].split()[0])
            rows.append((1.0 if regenerated else float(model["tensors"]), d, d * bands))
            times.append(cell["ms"])
            extra = cell["extra_mib"] * 2**20
            memory.append(extra / model["tensors"] if regenerated else extra / 4 / d - bands)
    scale = np.array([1.0, 1e9, 1e9])
    table, measured = np.array(rows) / scale, np.array(times)
    found, _ = nnls(table / measured[:, None], np.ones(len(measured)))
    error = float(np.abs(table @ found / measured - 1).max())
    fixed, per_parameter, per_band = (found / scale).tolist()
    return {
        "launch_ms" if regenerated else "tensor_ms": fixed,
        "parameter_ms": per_parameter,
        "band_ms": per_band,
        # Regenerated noise keeps a table of the tensors; buffers hold this many vectors more than there are bands.
        "tensor_bytes" if regenerated else "vectors_beside_bands": float(np.median(memory)),
        "worst_relative_error": error,
    }


def fit_steps(noise: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Milliseconds per parameter and token of a private step without its noise, the largest models of a precision."""
    found = {}
    for precision, names in STEP_MODELS.items():
        rates = []
        for cell in cells:
            if cell["model"] in names and cell["mode"] == "lambda-cgd" and cell["precision"] == precision:
                model = noise["models"][cell["model"]]
                without = cell["median_ms"] - model["contenders"]["regenerated, 2 bands"]["ms"]
                rates.append(without / (model["parameters"] * cell["batch"] * TOKENS[cell["model"]]))
        found[precision] = {"models": list(names), "parameter_token_ms": float(np.median(rates))}
    return found


def build() -> dict[str, Any]:
    noise = json.loads((ROOT / NOISE).read_text())
    cells = [cell for path in STEPS for cell in json.loads((ROOT / path).read_text())["cells"]]
    return {
        "sources": [NOISE, *STEPS],
        "device": noise["device"],
        "fitted_to_at_least": LARGE,
        "largest_measured": max(model["parameters"] for model in noise["models"].values()),
        "regenerated": fit_noise(noise["models"], "regenerated"),
        "buffered": fit_noise(noise["models"], "buffers on device"),
        "steps": fit_steps(noise, cells),
    }


def text() -> str:
    data = json.dumps(_rounded(build()), indent=4)
    return (
        '"""Fitted to measurements by ``python benchmarks/footprint.py``. Do not edit."""\n\n'
        f"from typing import Any\n\n# fmt: off\nMEASURED: dict[str, Any] = {data}\n"
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--print", action="store_true", help="print instead of writing the file")
    if parser.parse_args().print:
        print(text())
    else:
        TARGET.write_text(text())
        print(f"wrote {TARGET}")
