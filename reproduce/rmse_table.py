"""The paper's RMSE table, recomputed cell by cell: every mechanism at ε = 8 without and 8 … 1/4 with amplification.

The amplified σ comes from the exact accountant for λCGD, from Poisson's own for DP-SGD, and from Monte Carlo estimates
(with their standard error) for the rest; each cell says which. An estimate is right for comparing mechanisms; a plan
would certify it.
"""

from __future__ import annotations

from typing import Any

from lambdacgd.accounting import AccountingError, accountant_for
from lambdacgd.mechanisms import Identity, LambdaCGD, Mechanism, error_norms
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson
from reproduce.framework import Cell, Experiment, Row, Settings, panels, table
from reproduce.paper import COLUMNS, DELTA, HORIZON, ROWS, Column, known_slip
from reproduce.sampled import Sampled

_EXAMPLES, _BATCH_SIZE = 50_000, 128
_QUICK_ROWS = ("BandInvMF (p=2)", "BandInvMF (p=4)", "DP-λCGD (λ=0.9)", "BISR (p=4)", "BSR (p=4)", "DP-SGD")
_QUICK_COLUMNS = (Column(8.0, False), Column(8.0, True), Column(2.0, True))
_BY_TITLE = {row.title: row for row in ROWS}


def cells(settings: Settings) -> list[Cell]:
    """Column by column, so that an interrupted table is whole where it ends; a quick one takes fewer samples."""
    return [
        {
            "row": row.title,
            "column": column.title,
            "epsilon": column.epsilon,
            "delta": DELTA,
            "amplified": column.amplified,
            "relative_error": 0.05 if settings.quick else 0.03,
        }
        for column in COLUMNS
        for row in ROWS
        if not settings.quick or (row.title in _QUICK_ROWS and column in _QUICK_COLUMNS)
    ]


def compute(cell: Cell, settings: Settings) -> Row:
    """Our σ and RMSE beside the printed value."""
    row, column = _BY_TITLE[cell["row"]], Column(cell["epsilon"], cell["amplified"])
    mechanism = row.mechanism.resolve(HORIZON)
    printed = row.values[COLUMNS.index(column)]
    result: Row = {"mechanism": mechanism.to_dict(), "paper": printed, "known_slip": known_slip(row, column)}
    try:
        result |= _sigma(mechanism, column, cell["relative_error"])
    except AccountingError as refusal:
        return result | {"sigma": None, "rmse": None, "ratio": None, "method": "refused", "because": str(refusal)}
    result["rmse"] = error_norms(mechanism, HORIZON.steps)[0] * result["sigma"]
    return result | {"ratio": result["rmse"] / printed}


def _sigma(mechanism: Mechanism, column: Column, relative_error: float) -> Row:
    b, k = HORIZON.steps_per_epoch, HORIZON.epochs
    if not column.amplified:
        sampling: Cyclic | Poisson | BallsInBins = Cyclic(
            examples=_EXAMPLES, steps_per_epoch=b, epochs=k, batch_size=_BATCH_SIZE
        )
    elif isinstance(mechanism, Identity):
        sampling = Poisson(examples=_EXAMPLES, steps_per_epoch=b, epochs=k)
    elif isinstance(mechanism, LambdaCGD):
        sampling = BallsInBins("fixed", examples=_EXAMPLES, steps_per_epoch=b, epochs=k)  # the paper's
    else:
        estimate = Sampled(mechanism, HORIZON).sigma(column.epsilon, DELTA, relative_error=relative_error)
        relative = estimate.standard_error / estimate.value
        return {"sigma": estimate.value, "method": "monte-carlo estimate", "relative_standard_error": relative}
    calibrated = accountant_for(mechanism, sampling).sigma(column.epsilon, DELTA)
    return {"sigma": calibrated.sigma, "method": calibrated.certificate.method, "relative_standard_error": 0.0}


def page(rows: list[Row]) -> str:
    """Ours / the paper's in each cell; † marks a known slip of the paper, — what we refuse to account for."""
    by = {(row["row"], row["column"]): row for row in rows}
    columns = [column.title for column in COLUMNS if any(row["column"] == column.title for row in rows)]
    lines = []
    for title in (row.title for row in ROWS if any(cell["row"] == row.title for cell in rows)):
        lines.append([title, *(_text(by[title, column]) if (title, column) in by else None for column in columns)])
    notes = {row["known_slip"] for row in rows if row["known_slip"]}
    refused = {(row["row"], row["because"]) for row in rows if row["method"] == "refused"}
    parts = [
        table(["method", *columns], lines),
        "Ours / the paper's; ratios are in the CSV. δ = 1e-5, b = 390, k = 10.",
    ]
    parts.append(_WHY)
    parts += [f"† A slip in the paper's table: {note}." for note in sorted(notes)]
    parts += [f"— {title}: {because}." for title, because in sorted(refused)]
    return "\n\n".join(parts)


_WHY = (
    "Where they differ: the paper's amplified values are Monte Carlo estimates whose error it does not state; ours "
    "carry a standard error (in the CSV, below .2% of σ), and λCGD's and DP-SGD's are computed, not sampled. So "
    "differences up to about 2% are scatter. BandInvMF differs more where p ≥ 4: the optimum is flat, and the two "
    "programs stop at different coefficients (ours lower at p = 4, 16, 64), which amplification treats differently. "
    "At p = b every start we tried ends at our value without amplification (BISR, BSR, BandMF, BLT, perturbations). A "
    "lower one than the paper's, 7.79, comes out if the sensitivity adds the entries of C with their signs, which "
    "bounds nothing: with absolute values that matrix has 13.3. Ours has no negative entries, which Balls-in-Bins "
    "accounting needs."
)


def _text(cell: Row) -> str:
    mark = "†" if cell["known_slip"] else ""
    ours = "—" if cell["rmse"] is None else f"{cell['rmse']:.2f}"
    return f"{ours} / {cell['paper']:.2f}{mark}"


def families(rows: list[Row], family: dict[str, str], label: str) -> Any:
    """One panel for each family of mechanisms, by row title: our RMSE over ε as lines, the paper's as circles."""
    shown = {title: of for title, of in family.items() if any(row["row"] == title for row in rows)}
    names = list(dict.fromkeys(shown.values()))
    wide = min(4, len(names))
    figure, axes_of = panels(wide, -(-len(names) // wide), size=(4, 3.6), sharey=True)
    ticks = sorted({row["epsilon"] for row in rows})
    for unused in axes_of[len(names) :]:
        unused.set_axis_off()
    for axes, name in zip(axes_of, names, strict=False):
        for title in (title for title, of in shown.items() if of == name):
            points = sorted((row for row in rows if row["row"] == title), key=lambda row: row["epsilon"])
            ours, printed = ([p for p in points if p[what] is not None] for what in ("rmse", "paper"))
            (line,) = axes.plot([p["epsilon"] for p in ours], [p["rmse"] for p in ours], label=title)
            circles = [p["epsilon"] for p in printed], [p["paper"] for p in printed]
            axes.plot(*circles, "o", mfc="none", color=line.get_color())
        axes.set(xscale="log", yscale="log", xlabel="ε", title=name)
        axes.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.supylabel(label)
    return figure


def plot(rows: list[Row]) -> Any:
    """Over the amplified ε."""
    amplified = [row for row in rows if row["amplified"]]
    return families(amplified, {row.title: row.family for row in ROWS}, "RMSE (lines: ours, circles: the paper's)")


EXPERIMENT = Experiment(
    name="rmse-table",
    what="the paper's RMSE table, every mechanism and ε, beside ours",
    cells=cells,
    compute=compute,
    columns=(
        "row", "epsilon", "amplified", "sigma", "rmse", "paper", "ratio", "method", "relative_standard_error",
        "known_slip",
    ),
    page=page,
    plot=plot,
    title=lambda cell: f"{cell['row']}, {cell['column']}",
    depends=("mechanisms", "Poisson accountant", "fixed-bins accountant", "Monte Carlo"),
)  # fmt: skip
