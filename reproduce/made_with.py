"""What the code computes today, in a few numbers: whether a result was made by code that still says the same.

    python -m reproduce stale

A probe is a small question to one part of the library, or a number kept by hand where no small question will do. An
experiment names the probes that decide its values; their answers are kept with each finished cell, and a result is
stale where a probe answers differently today: by more than the searches for σ leave open, which no published digit
shows. So files may be moved and rewritten freely. The experiment's own command computes its stale cells again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from reproduce import EXPERIMENTS
from reproduce.framework import RESULTS

Answers = dict[str, list[float]]
SAME = 5e-4  # relative; the exact accountants' searches for σ end within that


def _sigma(mechanism: Any, sampling: Any) -> list[float]:
    import lambdacgd as lc

    ends = ((8.0, 1e-5), (0.5, 1e-5))
    plans = [lc.plan(2000, 100, epochs=2, epsilon=e, delta=d, mechanism=mechanism, sampling=sampling) for e, d in ends]
    return [plan.sigma for plan in plans]


def _poisson() -> list[float]:
    import lambdacgd as lc

    return _sigma(lc.Identity(), lc.Poisson())


def _fixed_bins() -> list[float]:
    import lambdacgd as lc

    return _sigma(lc.LambdaCGD(0.8), lc.BallsInBins("fixed"))


def _fresh_bins() -> list[float]:
    import lambdacgd as lc

    return _sigma(lc.LambdaCGD(0.8), lc.BallsInBins("fresh"))


def _dominating() -> list[float]:
    import lambdacgd as lc

    fresh = lc.BallsInBins("fresh")
    named = lc.BISR(4), lc.BandInvMF(4, normalized=True)
    return [lc.plan(2000, 100, epochs=2, epsilon=8.0, delta=1e-5, mechanism=m, sampling=fresh).sigma for m in named]


def _monte_carlo() -> list[float]:
    """Kept by hand: sampled estimates differ by their standard errors, which the tables state."""
    return [1.52069]


def _mechanisms() -> list[float]:
    """RMSE without amplification, which holds the sensitivity too, of each family in the paper's table."""
    from lambdacgd.mechanisms import Horizon, LambdaCGD, rmse
    from reproduce.paper import ROWS

    horizon = Horizon(20, 3)
    tabled = {row.family: row.mechanism for row in ROWS if not row.title.endswith(("p=64)", "p=b)"))}.values()
    return [rmse(each.resolve(horizon), horizon) for each in (*tabled, LambdaCGD(0.8, normalized=True))]


def _chosen(**how: Any) -> list[float]:
    from lambdacgd import choose_lambda
    from lambdacgd.mechanisms import Horizon

    return [choose_lambda(Horizon(20, 2), **how).value]


def _amplified(bins: str) -> list[float]:
    return _chosen(objective="amplified-rmse", epsilon=2.0, delta=1e-5, bins=bins)


def _noise() -> list[float]:
    from lambdacgd.noise.layout import FORMAT

    return [float(FORMAT)]


def _search() -> list[float]:
    from reproduce.search import REVISION

    return [REVISION]


def _training() -> list[float]:
    from reproduce.runs import REVISION

    return [REVISION]


PROBES: dict[str, Callable[[], list[float]]] = {
    "Poisson accountant": _poisson,
    "fixed-bins accountant": _fixed_bins,
    "fresh-bins accountant": _fresh_bins,
    "dominating chains": _dominating,
    "Monte Carlo": _monte_carlo,
    "mechanisms": _mechanisms,
    "choice of λ": lambda: _chosen(objective="rmse") + _chosen(objective="maxse"),
    "choice of λ, fixed bins": lambda: _amplified("fixed"),
    "choice of λ, fresh bins": lambda: _amplified("fresh"),
    "format of the noise": _noise,
    "search": _search,
    "training": _training,
}


@cache
def answer(probe: str) -> tuple[float, ...]:
    """What a probe says now, to six digits; computed from scratch, once a process."""
    from lambdacgd import cache as stored

    with stored.disabled():
        return tuple(float(f"{value:.6g}") for value in PROBES[probe]())


def made_with(probes: Iterable[str]) -> Answers:
    """The answers that a result computed now is kept with."""
    return {probe: list(answer(probe)) for probe in probes}


def changes(kept: Answers) -> list[str]:
    """What has changed since a result was kept with these answers."""
    said = []
    for probe, then in kept.items():
        now = answer(probe)
        if len(then) != len(now) or any(abs(a - b) > SAME * abs(b) for a, b in zip(then, now, strict=True)):
            said.append(f"{probe} (it was {_text(then)}, now {_text(now)})")
    return said


def _text(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def verdicts() -> dict[str, str]:
    """Each file of results with "current", "stale: …" or "unknown: …"."""
    files = [RESULTS / name / f"{name}.json" for name in EXPERIMENTS]
    said = {}
    for path in [path for path in files if path.exists()] + sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        kept = content.get("made_with", content.get("machine", {}).get("made_with"))
        text = "unknown: it says nothing of the code that made it"
        if kept is not None:
            changed = changes(kept)
            text = f"stale: {'; '.join(changed)}" if changed else "current"
        said[str(path.relative_to(RESULTS))] = text
    return said


KEPT: dict[str, tuple[str, ...]] = {
    "Timed on an H200 with format 1 of the noise; of the run with today's (20 November) this file did not come home": (
        "runtime-imdb/runtime-imdb.json",
    ),
}
"""Why results that are stale, or do not say what made them, are kept."""


def stale() -> None:
    """Say which results were made by code that computes something else today."""
    for name, text in verdicts().items():
        print(f"{name:<44} {text}")
