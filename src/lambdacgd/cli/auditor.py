"""``lambdacgd audit`` and ``lambdacgd verify``: is a plan's claim contradicted, and is its σ certified?"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from lambdacgd.cli.checker import imported
from lambdacgd.cli.options import place_for
from lambdacgd.planning import Plan


def audit(
    path: Path,
    train: str | None,
    *,
    runs: int | None,
    canaries: int | None,
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Audit the plan in a file and print the report; exit code 1 if something was caught."""
    from lambdacgd.auditing import audit as audited

    place_for("out", out)
    place_for("plot", plot)
    loop = None if train is None else imported("train", train)
    report = audited(Plan.load(path), loop, runs=runs, canaries=canaries)
    if out:
        report.save(out)
    if plot:
        report.plot(plot)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    if not report.passed:
        raise typer.Exit(1)


def verify(source: Path, *, as_json: bool) -> None:
    """Certify σ of a plan file or a release again and print what was certified."""
    from lambdacgd.verifying import verify as verified

    claim = verified(source)
    if as_json:
        print(json.dumps(claim.to_dict(), indent=2))
        return
    sure = "deterministic" if claim.confidence == 1 else f"fails with probability {1 - claim.confidence:.2g}"
    print(
        f"certified anew: ε = {claim.epsilon:g} at δ = {claim.delta:g} needs σ = {claim.needed_sigma:.6g} and has "
        f"{claim.sigma:.6g} ({claim.method}, {sure})"
    )
    if claim.note:
        print(claim.note)
