"""``lambdacgd plan`` and ``lambdacgd compare``: the planner, for people."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from lambdacgd import cache, footprint
from lambdacgd.cli import size as sizes
from lambdacgd.cli.options import place_for
from lambdacgd.footprint import Machine
from lambdacgd.mechanisms import Mechanism
from lambdacgd.planning import Plan
from lambdacgd.planning import plan as make_plan
from lambdacgd.sampling import BallsInBins
from lambdacgd.validation import InvalidInput


def compared(
    sampling: str, bands: int | None, buffers: int | None, bins: str | None = None
) -> list[tuple[str, str, dict[str, Any]]]:
    """What ``compare`` sets side by side: mechanism, sampling and parameters.

    Where bins may be of either kind, fresh ones are shown, and DP-SGD and λCGD over fixed ones beside them.
    """
    if sampling == "poisson":
        return [("dp-sgd", "poisson", {})]
    amplified = sampling == "balls-in-bins"
    best = {"objective": "amplified-rmse" if amplified else "rmse"}
    banded = {"bands": bands}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("dp-sgd", {}),
        ("lambda-cgd", best),
        ("lambda-cgd", best | {"normalized": True}),
        ("gamma-bifr", best | banded),
        ("bisr", banded),
        ("bandinvmf", banded),
        ("blt", {"buffers": buffers}),
        ("bsr", banded),
        ("bandmf", banded),
    ]
    if amplified and bins == "fixed":
        rows.insert(1, ("lambda-cgd", {"objective": "guideline"}))
    if not amplified:
        return [(name, sampling, parameters) for name, parameters in rows]
    found = [("dp-sgd", "poisson", dict[str, Any]())]
    found += [(name, sampling, parameters | {"bins": bins or "fresh"}) for name, parameters in rows]
    if bins is None:  # the paper's, for comparison
        found += [("dp-sgd", sampling, {"bins": "fixed"}), ("lambda-cgd", sampling, best | {"bins": "fixed"})]
    return found


@contextlib.contextmanager
def session(no_cache: bool) -> Iterator[None]:
    """One command: with or without the disk cache."""
    with cache.disabled() if no_cache else contextlib.nullcontext():
        yield


def show_plan(
    *,
    as_json: bool,
    out: Path | None,
    plot: Path | None,
    cross_check: bool,
    machine: Machine | None = None,
    **request: Any,
) -> None:
    place_for("out", out)
    _check_ending(plot)
    with _busy(as_json, "calibrating the noise"):
        plan = make_plan(request.pop("examples"), request.pop("batch_size"), **request)
        check = _cross_check(plan) if cross_check else None
    if out:
        plan.save(out)
    if plot:
        from lambdacgd.cli import plots

        plots.plan_figure(plan, plot)
    size = footprint.report(plan, machine) if machine else None
    if as_json:
        more = ({"cross_check": check} if check else {}) | ({"size": size} if size else {})
        print(json.dumps(plan.to_dict() | more, indent=2))
        return
    console = Console()
    console.print(
        Panel(_plan_table(plan, check), title=f"{describe(plan.mechanism)}, {plan.sampling.kind}", expand=False)
    )
    for line in _remarks(plan):
        console.print(line)
    if size:
        console.print(sizes.table(size))
        for line in sizes.remarks(size):
            console.print(line)
    for name, path in (("plan", out), ("figure", plot)):
        if path:
            console.print(f"{name} written to {path}")


def show_comparison(
    *, as_json: bool, plot: Path | None, bands: int | None, buffers: int | None, estimate: bool, **request: Any
) -> None:
    examples, batch_size, sampling = request.pop("examples"), request.pop("batch_size"), request.pop("sampling")
    bins = request.pop("bins")
    if bins is not None and sampling != BallsInBins.name:
        raise InvalidInput("bins", bins, f"it applies to balls-in-bins, not to {sampling}; leave it out")
    if request["epsilon"] == math.inf:
        raise InvalidInput("epsilon", math.inf, "without noise all are the same; compare at a finite ε")
    _check_ending(plot)
    plans = []
    for name, how, parameters in compared(sampling, bands, buffers, bins):
        with _busy(as_json, f"{name}, {how}"):
            described = {"mechanism": name, "sampling": how} | parameters | request
            plans.append(make_plan(examples, batch_size, estimate=estimate, **described))
    if plot:
        from lambdacgd.cli import plots

        plots.comparison_figure(plans, plot)
    if as_json:
        print(json.dumps([plan.to_dict() for plan in plans], indent=2))
        return
    console = Console()
    console.print(_comparison_table(plans))
    console.print(
        "RMSE and MaxSE are of the sum of gradients, in units of the clipping norm.\n"
        "Stored: noise vectors of the model's size; 0 means that the noise is regenerated."
    )
    if any(plan.certificate.kind == "estimate" for plan in plans):
        console.print("[yellow]~ marks an estimate, not a privacy claim; --certify or plan give certified values.[/]")
    if plot:
        console.print(f"figure written to {plot}")


def _check_ending(plot: Path | None) -> None:
    """Before the work rather than after it."""
    if plot:
        from lambdacgd.cli import plots

        plots.check_ending(plot)


_TITLES = {
    "dp-sgd": "DP-SGD",
    "lambda-cgd": "λCGD",
    "bisr": "BISR",
    "bandinvmf": "BandInvMF",
    "gamma-bifr": "γ-BIFR",
    "blt": "BLT",
    "bsr": "BSR",
    "bandmf": "BandMF",
    "diagonal": "diagonal",
}
_SYMBOLS = {"lam": "λ", "bands": "p", "gamma": "γ", "buffers": "m"}


def describe(mechanism: Mechanism) -> str:
    """A mechanism in a few words.

    >>> from lambdacgd.mechanisms import LambdaCGD
    >>> describe(LambdaCGD(0.9, normalized=True))
    'λCGD λ=0.9 normalised'
    >>> describe(LambdaCGD(0.99999))
    'λCGD λ=0.99999'
    """
    fields = mechanism.to_dict()
    words = [f"{symbol}={_short(fields[name])}" for name, symbol in _SYMBOLS.items() if name in fields]
    if fields.get("normalized"):
        words.append("normalised")
    return " ".join([_TITLES[mechanism.name], *words])


def _short(value: float) -> str:
    """Four digits, or all of them where those would make 1 of something below."""
    text = f"{value:.4g}"
    return text if value >= 1 or float(text) < 1 else repr(value)


def memory(mechanism: Mechanism, steps: int) -> str:
    """What the noise needs beside the gradient, in vectors of its size."""
    past = mechanism.past_vectors(steps)
    if past == 0:
        return "nothing"
    return f"regenerates {past}" if mechanism.regenerates(steps) else f"stores {past}"


def _plan_table(plan: Plan, check: dict[str, Any] | None) -> Table:
    table = Table.grid(padding=(0, 2))
    add = table.add_row
    add("privacy", f"ε = {plan.epsilon:g}, δ = {plan.delta:g}, zero-out of one example")
    add(
        "training",
        f"{plan.examples} examples, batch {plan.batch_size}, {plan.epochs} epochs × {plan.steps_per_epoch} steps",
    )
    add("noise multiplier σ", f"{plan.sigma:.6g}  (relative to the clipping norm)")
    add("sensitivity of C", f"{plan.sensitivity:.6g}")
    add("RMSE, MaxSE", f"{plan.rmse:.5g}, {plan.maxse:.5g}")
    add("past noise", f"{memory(plan.mechanism, plan.block.steps)} (vectors of the model's size)")
    certificate = plan.certificate
    sure = (
        "deterministic" if certificate.confidence == 1 else f"fails with probability {1 - certificate.confidence:.2g}"
    )
    kind = "certificate" if certificate.kind == "bound" else "[yellow]estimate[/]"
    add(kind, f"{certificate.method}, {certificate.direction}, {sure}")
    if "estimate" in certificate.details:
        error = certificate.details.get("estimate_standard_error", 0.0)
        add("its estimate", f"σ ≈ {certificate.details['estimate']:.5g} ± {error:.2g}, which claims nothing")
    if check:
        add("cross-check", f"Monte Carlo δ = {check['delta']:.4g} ± {check['standard_error']:.2g} at this σ")
    return table


def _remarks(plan: Plan) -> list[str]:
    lines = []
    if plan.epsilon == float("inf"):
        lines.append("[red bold]ε = inf: no noise is added and nothing is private.[/]")
    if plan.certificate.kind == "estimate":
        lines.append("[yellow]This σ is an estimate, not a privacy claim; leave out --estimate to certify it.[/]")
    if "transfer_matrix_refused" in plan.certificate.details:
        refusal = plan.certificate.details["transfer_matrix_refused"]
        lines.append(f"[yellow]The exact accountant does not answer here, so this σ is sampled:[/] {escape(refusal)}")
    if plan.delta * plan.examples > 1:
        lines.append(
            f"[yellow]δ is above 1/N = {1 / plan.examples:.2g}: such a δ allows publishing an example outright.[/]"
        )
    if plan.choice:
        lines.append(f"{plan.choice['parameter']} was chosen by {plan.choice['objective']}: {plan.choice['because']}")
        for candidate in plan.choice.get("candidates", ()):
            where = "amplified" if candidate["amplified"] else "at unit noise"
            lines.append(
                f"  {candidate['objective']:<15} {candidate['value']:.5f}   RMSE {candidate['rmse']:.4g} {where}"
            )
    return lines


def _comparison_table(plans: list[Plan]) -> Table:
    usual = plans[len(plans) // 2]  # of the kind that most rows are
    settings = (
        f"N = {usual.examples}, B = {usual.batch_size}, k = {usual.epochs}, ε = {usual.epsilon:g}, δ = {usual.delta:g}"
    )
    table = Table(title=f"{settings}, {usual.sampling.kind}", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mechanism", no_wrap=True)
    for heading in ("σ", "RMSE", "MaxSE", "stored"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("certificate", overflow="ellipsis")  # the one that gives way where the terminal is narrow
    best = min(plan.rmse for plan in plans)
    for plan in plans:
        mark = "~" if plan.certificate.kind == "estimate" else ""
        apart = ""
        if plan.sampling.kind != usual.sampling.kind:
            apart = f" ({getattr(plan.sampling, 'bins', plan.sampling.name)})"
        table.add_row(
            describe(plan.mechanism) + apart,
            f"{mark}{plan.sigma:.4g}",
            f"{mark}{plan.rmse:.4g}",
            f"{mark}{plan.maxse:.4g}",
            _stored(plan),
            plan.certificate.method,
            style="bold" if plan.rmse == best else "",
        )
    return table


def _stored(plan: Plan) -> str:
    n = plan.block.steps
    return "0" if plan.mechanism.regenerates(n) else str(plan.mechanism.past_vectors(n))


def _cross_check(plan: Plan) -> dict[str, Any]:
    from lambdacgd.accounting import accountant_for

    return accountant_for(plan.mechanism, plan.sampling).cross_check(plan.sigma, plan.epsilon)


@contextlib.contextmanager
def _busy(quiet: bool, what: str) -> Iterator[None]:
    """A spinner on a terminal's stderr while something takes its time."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(f"{what} …"):
        yield
