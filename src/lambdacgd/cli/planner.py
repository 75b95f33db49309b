"""``lambdacgd plan`` and ``lambdacgd compare``: the planner, for people."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from lambdacgd.accounting.accountants import exact_numbers
from lambdacgd.cli.options import number_or_auto, place_for, plan_arguments
from lambdacgd.planning import Plan
from lambdacgd.planning import plan as make_plan
from lambdacgd.questions import compare


def show_plan(request: dict[str, Any], *, as_json: bool, out: Path | None) -> None:
    """Make a plan and print it; ``request`` is described at ``plan_arguments``."""
    place_for("out", out)
    with warnings.catch_warnings(record=True) as warned:
        plan = make_plan(**plan_arguments(request))
    if out:
        plan.save(out)
    for warning in warned:
        Console(stderr=True).print(f"[yellow]{escape(str(warning.message))}[/]")
    if as_json:
        print(plan.to_json())
        return
    console, table = Console(), Table.grid(padding=(0, 2))
    for row in plan.rows():
        table.add_row(*row)
    past = plan.mechanism.past_vectors(plan.block.steps)
    kept = f"stores {past} of the model's size" if _stored(plan) else f"stores none, regenerates {past} from the key"
    table.add_row("past noise", kept if past else "none needed")
    console.print(Panel(table, title="Plan", expand=False))
    if plan.epsilon == float("inf"):
        console.print("[red bold]ε = inf: no noise is added and nothing is private.[/]")
    if refusal := plan.certificate.details.get("transfer_matrix_refused"):
        console.print(f"[yellow]The exact accountant refuses, so this σ has no amplification:[/] {escape(refusal)}")
    if selection := plan.selection:
        were = "were" if selection["parameter"].endswith("s") else "was"
        console.print(f"{selection['parameter']} {were} chosen by {selection['objective']}: {selection['because']}")
        if "candidates" in selection:
            console.print("What each objective would choose, by quick estimates:")
        for candidate in selection.get("candidates", ()):
            where = "" if candidate["amplified"] else " at unit noise"
            choice = f"{candidate['objective']:<15} {candidate['value']:.4f}"
            console.print(f"  {choice}   RMSE ~{candidate['rmse']:.3g}{where}")
    if out:
        console.print(f"plan written to {out}")


def show_comparison(request: dict[str, Any], *, as_json: bool) -> None:
    """Make the plans that are compared and print them side by side; ``request`` is described at ``plan_arguments``."""
    sizes = {name: value for name in ("bands", "buffers") if (value := request.pop(name, None)) is not None}
    if "bands" in sizes:
        sizes["bands"] = number_or_auto("bands", sizes["bands"])
    plans = compare(**plan_arguments(request), **sizes)
    if as_json:
        print(json.dumps([plan.to_dict() for plan in plans], indent=2))
        return
    usual = plans[len(plans) // 2]  # of the kind that most rows are
    run = f"N = {usual.examples}, B = {usual.described_batch_size}, k = {usual.epochs}"
    title = f"{run}, ε = {usual.epsilon:g}, δ = {usual.delta:g}\n{usual.sampling.kind}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mechanism", no_wrap=True)
    for heading in ("σ", "RMSE", "MaxSE", "stored"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("certificate", overflow="ellipsis")
    best = min(plan.rmse for plan in plans)
    for plan in plans:
        other = plan.sampling.kind != usual.sampling.kind
        apart = f" ({getattr(plan.sampling, 'bins', plan.sampling.name)})" if other else ""
        numbers = [f"{value:.4g}" for value in (plan.sigma, plan.rmse, plan.maxse)]
        style = "bold" if plan.rmse == best else ""
        table.add_row(str(plan.mechanism) + apart, *numbers, str(_stored(plan)), _method(plan), style=style)
    console = Console()
    console.print(table)
    console.print(
        "RMSE and MaxSE are of the sum of gradients, in units of the clipping norm.\n"
        "Stored: noise vectors of the model's size; 0 means that the noise is regenerated.\n"
        "Exact: the transfer-matrix accountant. Dominated: the same, of one that reveals at least as much."
    )


def _method(plan: Plan) -> str:
    """Who certified the plan, in a word that fits beside the numbers in 80 columns."""
    if not plan.certificate.method.startswith("transfer-matrix"):
        return plan.certificate.method
    return "dominated" if exact_numbers(plan.mechanism, plan.block.steps) is None else "exact"


def _stored(plan: Plan) -> int:
    """How many noise vectors of the model's size are kept."""
    steps = plan.block.steps
    return 0 if plan.mechanism.regenerates(steps) else plan.mechanism.past_vectors(steps)
