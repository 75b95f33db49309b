"""Fitted to measurements by ``python benchmarks/footprint.py``. Do not edit."""

from typing import Any

# fmt: off
MEASURED: dict[str, Any] = {
    "sources": [
        "results/noise-h200.json",
        "results/step-h200.json",
        "results/step-h200-host-bound.json"
    ],
    "device": "NVIDIA H200",
    "fitted_to_at_least": 80000000,
    "largest_measured": 630777610,
    "regenerated": {
        "launch_ms": 0.0,
        "parameter_ms": 1.61e-09,
        "band_ms": 3.501e-09,
        "tensor_bytes": 514.5,
        "worst_relative_error": 0.04406
    },
    "buffered": {
        "tensor_ms": 0.03365,
        "parameter_ms": 0.0,
        "band_ms": 2.653e-09,
        "vectors_beside_bands": 1.004,
        "worst_relative_error": 0.3632
    },
    "steps": {
        "tf32": {
            "models": [
                "vit-l",
                "bert-large"
            ],
            "parameter_token_ms": 4.68e-11
        },
        "bf16": {
            "models": [
                "vit-b"
            ],
            "parameter_token_ms": 2.886e-11
        }
    }
}
