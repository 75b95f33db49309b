"""The command line of a checkout."""

from __future__ import annotations


def test_help_of_the_benchmarks_names_their_models_and_modes():
    from reproduce import cli_bench as bench
    from reproduce.bench_models import CASES
    from reproduce.bench_step import MODES
    from reproduce.model_shapes import MODELS

    def described(command: str, option: str) -> str:
        annotated = getattr(bench, command).__annotations__[option]
        return eval(annotated, vars(bench)).__metadata__[0].help

    assert described("noise", "model").startswith(", ".join(MODELS) + ";")
    assert described("step", "model").startswith(", ".join(CASES) + ";")
    assert described("pair", "model").startswith(", ".join(CASES) + ";")
    assert described("step", "mode").startswith(", ".join(MODES) + ";")
