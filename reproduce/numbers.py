"""Numbers in README and docs, written from the files in ``results/`` so that they cannot drift.

    python -m reproduce numbers [--check]

A page says where: ``<!-- numbers: NAME -->`` … ``<!-- end -->``, within a line or around a block; NAME is one of the
functions below. Plots shown on pages are copied from ``results/`` to ``docs/figures/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lambdacgd.cli.options import flag
from reproduce import EXPERIMENTS, frontier, lower_noise, paper, record
from reproduce.bench_noise import FLAT
from reproduce.framework import MORE, RESULTS, ROOT, table, value_range
from reproduce.made_with import KEPT, verdicts
from reproduce.paper_setting import MODELS
from reproduce.runs import method

FIGURES = ROOT / "docs" / "figures"
PLACE = re.compile(r"(<!-- numbers: ([a-z0-9-]+) -->)(.*?)(<!-- end -->)", re.S)
TITLES = {
    "cnn": "CNN", "wrn-40-4": "WideResNet-40-4", "wrn-16-4": "WideResNet-16-4", "vit-b": "ViT-B", "vit-l": "ViT-L",
    "vit-h": "ViT-H", "bert-tiny": "BERT-tiny", "bert-base": "BERT-base", "bert-large": "BERT-large", "lstm": "LSTM",
    "gpt2": "GPT-2", "llama-lora": "Llama, 1.1B, LoRA", FLAT: "one tensor",
}  # fmt: skip
LAMBDA_CGD = "regenerated, 2 bands"
_PRECISIONS = {"tf32": "TF32", "bf16": "bfloat16"}


def result(path: str) -> dict[str, Any]:
    """A file of results."""
    if not (RESULTS / path).exists():
        raise SystemExit(f"results/{path} is missing")
    content: dict[str, Any] = json.loads((RESULTS / path).read_text())
    return content


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows that ``python -m reproduce NAME`` wrote."""
    written = result(f"{name}/{name}.json")
    if written["quick"]:
        raise SystemExit(f"results/{name} is a quick version")
    rows: list[dict[str, Any]] = written["rows"]
    return rows


def _noise() -> dict[str, dict[str, Any]]:
    models = result("noise-h200.json")["models"]
    return {name: models[name] for name in TITLES if name in models}


def noise_over_opacus() -> str:
    """λCGD's two streams over Opacus's one, least and most over the models."""
    models = (model["contenders"] for name, model in _noise().items() if name != FLAT)
    return value_range([model[LAMBDA_CGD]["over opacus DP-SGD"] for model in models], ".2f")


def noise_extra_memory() -> str:
    """A bound on the extra memory, in tenths of a MiB."""
    most = max(model["contenders"][LAMBDA_CGD]["extra_mib"] for model in _noise().values())
    return f"{int(10 * most) / 10 + 0.1:.1f} MiB"


def noise_table() -> str:
    head = ["model", "parameters", "copy", "Opacus, DP-SGD", "rewinding, 2 bands", "regenerated λCGD", "over Opacus",
            "16 bands", "buffer on CPU, 2 bands"]  # fmt: skip
    lines = []

    def ms(value: float) -> str:
        return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"

    for name, model in _noise().items():
        c = model["contenders"]
        cells = [TITLES[name], f"{model['parameters'] / 1e6:.1f}M"]
        cells += [ms(c[name]["ms"]) for name in ("copy", "opacus DP-SGD", "rewinding generator, 2 bands")]
        cells += [f"**{ms(c[LAMBDA_CGD]['ms'])}**", f"{c[LAMBDA_CGD]['over opacus DP-SGD']:.2f}"]
        others = ("regenerated, 16 bands", "buffers on cpu, 2 bands")
        cells += [ms(c[name]["ms"]) for name in others]
        lines.append(cells)
    return _table(head, lines)


def captured_epochs() -> str:
    """Ten epochs of the sweeps' CNN, by captured steps and by the plain loop."""
    measured = result("captured-h200.json")
    cold, warm, loop = measured["cold"], measured["warm"], measured["plain"]["seconds_of_all_steps"]
    return (
        f"{warm['steps']} steps took {warm['seconds']:.1f} s, in the first run of a process {cold['seconds']:.1f} s, "
        f"{cold['until_first_step']:.1f} of them before the first step was done (kernels are compiled, graphs "
        f"captured). The plain loop took {loop:.0f} s"
    )


def captured_summary() -> str:
    """The same in one line."""
    measured = result("captured-h200.json")
    return f"{measured['warm']['seconds']:.0f} s instead of {measured['plain']['seconds_of_all_steps']:.0f}"


def rmse_ratios() -> str:
    """Ours over the printed value, least and most, in groups."""
    rows = [row for row in rows_of("rmse-table") if row["ratio"] is not None and not row["known_slip"]]

    def extent(chosen: list[dict[str, Any]]) -> str:
        ratios = [row["ratio"] for row in chosen]
        return f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "none"

    def banded(row: dict[str, Any]) -> bool:
        return bool(row["row"].startswith("BandInvMF"))

    plain, amplified = ([row for row in rows if row["amplified"] is way] for way in (False, True))
    exact = [row for row in amplified if row["row"].startswith("DP-λCGD")]
    return _block(
        f"- without amplification: {extent([r for r in plain if not banded(r)])} for every mechanism but BandInvMF "
        f"({extent([r for r in plain if banded(r)])});\n"
        f"- with amplification: {extent([r for r in amplified if not banded(r)])}; where the exact accountant answers "
        f"(λCGD), {extent(exact)}; BandInvMF {extent([r for r in amplified if banded(r)])}."
    )


def _rmse(title: str, epsilon: float) -> float:
    rows = rows_of("rmse-table")
    return next(float(r["rmse"]) for r in rows if r["row"] == title and r["epsilon"] == epsilon and r["amplified"])


def _runtime(part: str = "variants") -> dict[str, dict[str, Any]]:
    """Model -> variants (or another part of the rows), of both tables."""
    rows = rows_of("runtime-cifar") + rows_of("runtime-imdb")
    return {row["model"]: row[part] for row in rows if part in row}


def _pairs() -> dict[tuple[str, str, int], dict[str, Any]]:
    """λCGD's step over DP-SGD's by model, precision and batch."""
    cells = [cell for cell in result("pair-h200.json")["cells"] if "ratio" in cell]
    places = {(cell["model"], cell["precision"], cell["batch"]): cell for cell in cells}
    return dict(sorted(places.items(), key=lambda item: _place(*item[0])))


SHARP = 0.015  # an interval of a ratio of times this wide, or narrower, says something


def runtime_summary() -> str:
    """What λCGD's step costs, with intervals."""
    cells = _pairs()
    sharp = {place: cell for place, cell in cells.items() if cell["high"] - cell["low"] <= SHARP}
    said = [
        f"{cell['ratio']:.3f} ({cell['low']:.3f} to {cell['high']:.3f}) for {TITLES[model]} in batches of {batch}"
        for (model, _, batch), cell in sharp.items()
    ]
    wide = [cell for place, cell in cells.items() if place not in sharp]
    text = f"of DP-SGD's time a step (95% intervals) {', '.join(said)}"
    if wide:
        ends = value_range([end for cell in wide for end in (cell["low"], cell["high"])], ".2f")
        holds = sum(cell["low"] <= 1 <= cell["high"] for cell in wide)
        text += f"; for smaller models, which wait for the host, it cannot be told: {holds} of {len(wide)} intervals "
        text += f"hold 1, and they reach from {ends}"
    return text


def buffer_summary() -> str:
    """What noise kept on the CPU costs an epoch, and memory."""
    known = [v[f"CPU buffer, {p} bands"].get("over_dp_sgd") for v in _runtime().values() for p in (2, 4, 16)]
    extra = [peaks[LAMBDA_CGD] - peaks["DP-SGD"] for peaks in _runtime("peaks_mib").values()]
    text = f"{value_range([value for value in known if value is not None], '.2f')} of DP-SGD's time an epoch"
    more = max(0.0, *extra)
    memory = f"at most {more:.1f} MiB more" if more >= 0.05 else "no more"
    return f"{text}; regenerated noise takes {memory} memory than DP-SGD"


Rows = dict[tuple[str, float, int], dict[str, Any]]


def _frontier() -> Rows:
    return {(row["method"], row["epsilon"], row["epochs"]): row for row in rows_of("frontier")}


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['test']:.1f} ± {100 * row['standard_error']:.1f}%"


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    middle, low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in frontier.welch(a["scores"], b["scores"]))
    return f"{middle} ({low} to {high})"


def _beside() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Ours and DP-SGD's rows of the frontier at 10 and 10, 10 and 40, and 40 and 40 epochs, where both are there."""
    rows, epochs = _frontier(), ((10, 10), (10, 40), (40, 40))
    places = [((frontier.OURS, e, k), (frontier.DP_SGD, e, late)) for e in (8.0, 2.0, 1.0) for k, late in epochs]
    return [(rows[ours], rows[theirs]) for ours, theirs in places if ours in rows and theirs in rows]


def lower_noise_table() -> str:
    """What might need less noise than the default: RMSE, and accuracy where it was trained."""
    defaults = {e: _frontier()[frontier.OURS, e, 10] for e in (8.0, 2.0)}
    trained = {(row["method"], row["epsilon"]): row for row in _known("lower-noise")}
    lines = [
        [f"{e:g}", "the default", f"{row['sigma']:.4g}", f"{row['rmse']:.2f}", "", "certified", _percent(row), ""]
        for e, row in defaults.items()
    ]
    for variant, plan in lower_noise.plans_compared():
        default, mine = defaults[plan.epsilon], trained.get((variant, plan.epsilon))
        lines.append(
            [
                f"{plan.epsilon:g}", method(variant).title, f"{plan.sigma:.4g}", f"{plan.rmse:.2f}",
                f"{100 * (plan.rmse / default['rmse'] - 1):+.1f}%".replace("-", "−"),
                "certified" if plan.certificate.kind == "bound" else plan.certificate.method,
                _percent(mine) if mine else "", _difference(mine, default) if mine else "",
            ]
        )  # fmt: skip
    lines.sort(key=lambda line: -float(line[0]))
    head = ["ε", "", "σ", "RMSE", "beside the default's", "σ is", "test accuracy", "points, 95% interval"]
    return _table(head, lines)


def fine_tuned() -> str:
    """What fine-tuning a BERT that was pretrained here has come to."""
    rows = {(row["method"], row["epsilon"]): row for row in _known("fine-tuning")}
    names = {
        frontier.OURS: "normalised λCGD with fresh bins", frontier.PAPER: "λCGD with fixed bins",
        frontier.DP_SGD: "DP-SGD",
    }  # fmt: skip
    epsilons = [e for e in sorted({e for _, e in rows}, reverse=True) if all((name, e) in rows for name in names)]
    if not epsilons:
        return _block(
            "No pretrained BERT has been fine-tuned here (`python -m reproduce pretrain`, then `fine-tuning`): our "
            "models on IMDb are a bag of words and an LSTM from scratch, so nothing on this page speaks of fine-tuning."
        )
    said = []
    for e in epsilons:
        has = [f"{title} {_percent(rows[n, e])} (B = {rows[n, e]['batch_size']})" for n, title in names.items()]
        said.append(f"at ε = {e:g} {', '.join(has)}")
    pairs = ((frontier.OURS, frontier.DP_SGD), (frontier.OURS, frontier.PAPER), (frontier.PAPER, frontier.DP_SGD))
    points = [
        f"{names[a]} over {names[b]} {' and '.join(_difference(rows[a, e], rows[b, e]) for e in epsilons)}"
        for a, b in pairs
    ]
    words = _tested(rows_of("methods-imdb"))[frontier.OURS, 8.0]
    return _block(
        "**Fine-tuning**: a BERT of BERT-tiny's size was pretrained here on the texts of the test reviews, without "
        f"labels, and then fine-tuned privately on IMDb. Test accuracy: {'; '.join(said)}. In points at "
        f"ε = {' and '.join(f'{e:g}' for e in epsilons)}, with 95% intervals: {'; '.join(points)} (`fine-tuning`). "
        f"{frontier.at_the_edge(list(rows.values()))} A bag of words from scratch is better than any: {words}% "
        "at ε = 8 (`methods-imdb`)."
    )


def _known(name: str) -> list[dict[str, Any]]:
    """The rows of an experiment, none where it has not been run."""
    return rows_of(name) if (RESULTS / name / f"{name}.json").exists() else []


def frontier_claim() -> str:
    """The first sentence: ours beside DP-SGD at ε = 8, with B, k, model, seeds and intervals."""
    (mine, short), (_, long), (late, _) = (pair for pair in _beside() if pair[0]["epsilon"] == 8)
    return _block(
        f"At ε = 8, δ = 10⁻⁵, a CNN of 0.3M parameters trained from scratch on CIFAR-10 reaches {_percent(mine)} after "
        f"10 epochs with normalised λCGD and fresh bins (B = {mine['batch_size']}), where DP-SGD (Poisson, "
        f"B = {long['batch_size']}) has {_percent(short)} after 10 and {_percent(long)} after 40: **DP-SGD's accuracy "
        f"at a quarter of its epochs** (difference {_difference(mine, long)} points). After 40 epochs λCGD has "
        f"{_percent(late)}. Each method has its own best batch size B; means ± standard errors of "
        f"{len(mine['scores'])} seeds, 95% intervals in brackets."
    )


def frontier_table() -> str:
    """The same at every ε."""
    lines = [
        [f"{a['epsilon']:g}", *(f"{_percent(row)} after {row['epochs']} (B = {row['batch_size']})" for row in (a, b)),
         _difference(a, b)]
        for a, b in _beside()
    ]  # fmt: skip
    head = ["ε", "normalised λCGD, fresh bins", "DP-SGD", "points, 95% interval"]
    return _table(head, lines)


EDGE = "- **Some searches"


def against_us() -> str:
    """What the frontier has against us, and IMDb, where fresh bins do not clearly help."""
    theirs = [line for line in _frontier_against_us() if not line.startswith(EDGE)]
    imdb = _tested(rows_of("methods-imdb"))
    names = ("lambda-cgd-fresh-normalized", "lambda-cgd", "dp-sgd")
    said = [f"{', '.join(imdb[name, e] for name in names)} at ε = {e:g}" for e in (8.0, 2.0, 0.5)]
    imdb_says = (
        "- **On IMDb fresh bins do not clearly help** (a bag of words from scratch, B = 512, k = 10, percent, "
        f"three seeds; normalised λCGD with fresh bins, λCGD with fixed bins, DP-SGD): {'; '.join(said)}."
    )
    return _block("\n".join([*theirs, imdb_says]))


def searches_at_the_edge() -> str:
    """The frontier's searches that may be short of their best: a list too long for README."""
    return _block("\n".join(line for line in _frontier_against_us() if line.startswith(EDGE)))


def _frontier_against_us() -> list[str]:
    return frontier.against_us(list(_frontier().values())).partition("\n\n")[2].splitlines()


def not_reproduced() -> str:
    """What the paper observes and we do not, each with our numbers."""
    cifar, imdb = ({(r["method"], r["epsilon"]): r for r in rows_of(f"methods-{name}")} for name in ("cifar", "imdb"))
    rows = _frontier()

    def over(other: str, epsilons: tuple[float, ...]) -> str:
        tabled = [
            f"{100 * (cifar['lambda-cgd', e]['test'] - cifar[other, e]['test']):+.1f} at ε = {e:g}" for e in epsilons
        ]
        ours = [
            f"{100 * (rows[frontier.PAPER, e, 10]['test'] - rows[other, e, 10]['test']):+.1f} at ε = {e:g}"
            for e in epsilons
            if (frontier.PAPER, e, 10) in rows and (other, e, 10) in rows
        ]
        beside = f"; `frontier`, at each one's best B, {', '.join(ours)}" if ours else ""
        return f"`methods-cifar` {', '.join(tabled)} points (standard errors about 1){beside}"

    at = {name: row["test"] for (name, e), row in imdb.items() if e == 0.25}
    top = max(at, key=lambda name: at[name])
    costs = []
    for name, paper_says in (("cifar", "nearly 10%"), ("imdb", "70%")):
        variants = [row["variants"] for row in rows_of(f"runtime-{name}") if "variants" in row]
        cost = [100 * (v["CPU buffer, 2 bands"]["over_dp_sgd"] - 1) for v in variants]
        costs.append(f"{value_range(cost, '.0f')}% on {name} models (the paper: {paper_says})")
    given = {(row["model"], row["method"]): _percent(row) for row in rows_of("paper-setting") if row["epsilon"] == 8}
    trained = [
        f"{title} λCGD has {given[model, 'lambda-cgd']} and DP-SGD {given[model, 'dp-sgd']}"
        for model, title in MODELS.items()
    ]
    lines = (
        "**The paper's own hyperparameters** (ζ = 8, its λ and rates, ε = 8, five seeds; the paper does not print its "
        f"CNN, so ours): {', '.join(trained)}; `paper-setting` has the table.",
        f"**Gains at ε ≤ 1 with fixed bins** (“even at ε = 1/4”): {over('dp-sgd', (1.0, 0.5, 0.25))}.",
        f"**Parity with BISR (p = 16) on CIFAR-10**: {over('bisr-16', (8.0, 4.0, 2.0, 1.0))}.",
        f"**One λ for all ε**: {_finding('amplified-sweep', 'Over ε').partition(') ')[2]} `amplified-sweep` has the λ.",
        "**The guideline on IMDb** (λ below the amplified RMSE's): "
        + _finding("amplified-sweep", "Without a search").partition(": ")[2],
        f"**λCGD the best of all at ε = ¼ on IMDb**: it has {100 * at['lambda-cgd']:.1f}%, DP-SGD "
        f"{100 * at['dp-sgd']:.1f}% and {method(top).title} {100 * at[top]:.1f}%. Ours is a bag of words, the paper's "
        "a BERT-base.",
        f"**The cost of a noise buffer on the CPU**, two bands: {', '.join(costs)}; ours is pinned host memory on "
        "another machine.",
    )
    return _block("\n".join(f"- {line}" for line in lines))


def contradictions() -> str:
    """Where the paper's sentences on time and its own tables disagree."""

    def more(title: str, variant: str) -> float:
        row = next(row for table in paper.TABLES.values() for row in table.models if row.title == title)
        return 100 * ((row.value(variant) or 0) / (row.value(paper.DP_SGD) or 1) - 1)

    two, sixteen = "regenerated, 2 bands", "regenerated, 16 bands"
    return _block(
        f"- “Less than 1% on CIFAR-10 and 2% on IMDB” more time, and “within 1%” two sections before: its table has "
        f"{more('BERT-tiny', two):.1f}% for BERT-tiny and {more('LSTM (1M)', two):.1f}% for the LSTM.\n"
        f"- “At most 8%” for regenerating 4 or 16 bands: its table has {more('BERT-tiny', sixteen):.1f}% for BERT-tiny "
        f"and {more('BERT-base (110M)', sixteen):.1f}% for BERT-base with 16.\n"
        "- Two slips of its RMSE table are marked † in `rmse-table`."
    )


def stale_results() -> str:
    """Which results were made by code that computes something else today, or do not say by which, and why they stay."""
    why = {name: f" {reason}." for reason, names in KEPT.items() for name in names}
    files: dict[tuple[str, str], list[str]] = {}
    for name, text in verdicts().items():
        if text != "current":
            kind = "written before results kept this" if text.startswith("unknown") else text.removeprefix("stale: ")
            files.setdefault((kind, why.get(name, "")), []).append(f"`results/{name}`")
    return _block(
        "\n".join(f"- {kind}: {', '.join(names)}.{reason}" for (kind, reason), names in files.items()) or "None."
    )


LITERATURE = (
    "For scale: a CNN of 0.3M parameters is not the state of the art. On CIFAR-10 without other data, Papernot et al. "
    "(2021) report 66.2% at ε = 7.53 with a small CNN; De et al. (2022) report 56.8, 65.9, 73.5 and 81.4% at ε = 1, 2, "
    "4 and 8 with Wide-ResNets, about 200 epochs and 16 views of each image in a step: hundreds of times the computing "
    "of the runs above."
)


def readme_results() -> str:
    """The short list in README."""
    pairs = ((e, _rmse("DP-SGD", e), _rmse("DP-λCGD (λ=0.95)", e)) for e in (8.0, 2.0))
    said = ", ".join(f"ε = {e:g}: {b:.1f}, DP-SGD {a:.1f}" for e, a, b in pairs)
    return _block(
        "- **Error** (RMSE in the paper's setting: 50 000 examples, batches of 128, 10 epochs, δ = 1e-5, fixed bins, "
        f"λ = .95): {said}.\n"
        f"- **Time** (an H200): λCGD takes {runtime_summary()}.\n"
        f"- **Beside noise kept on the CPU** (2 to 16 bands): that takes {buffer_summary()}."
    )


def _tested(rows: list[dict[str, Any]]) -> dict[tuple[str, float], str]:
    """(method, ε) -> test accuracy in percent, with its standard error."""
    texts = {}
    for row in rows:
        if "test" in row:
            error = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.1f}"
            texts[row["method"], row["epsilon"]] = f"{100 * row['test']:.1f}{error}"
    return texts


def _finding(name: str, begins: str) -> str:
    """A line of "What comes out" on a sweep's page: theory's λ take minutes to compute, the pages have them."""
    line = re.search(rf"^- \*\*({begins}.*)$", (RESULTS / name / f"{name}.md").read_text(), re.M)
    assert line is not None, (name, begins)
    return line[1].replace("**", "")


def without_a_search() -> str:
    """What theory's λ and the guideline's lose to the best."""
    return _block(f"> {_finding('amplified-sweep', 'Without a search')}")


def fresh_accuracy() -> str:
    """Fresh beside fixed bins on CIFAR-10, with and without correlation."""
    texts = _tested(rows_of("methods-cifar"))
    names = {
        "lambda-cgd-fresh-normalized": "normalised λCGD, fresh bins", "lambda-cgd-fresh": "λCGD, fresh bins",
        "lambda-cgd": "λCGD, fixed bins", "dp-sgd-fresh": "DP-SGD, fresh bins", "dp-sgd": "DP-SGD, Poisson",
    }  # fmt: skip
    epsilons = sorted({epsilon for _, epsilon in texts}, reverse=True)
    lines = [[title, *(texts.get((name, e), "") for e in epsilons)] for name, title in names.items()]
    return _table(["", *(f"ε = {e:g}" for e in epsilons)], lines)


ByMode = dict[str, dict[str, Any]]


def _modes(files: str) -> list[tuple[tuple[str, str, int], ByMode]]:
    """The cells of `bench step`'s files: (model, precision, batch), and what was measured of each mode."""
    modes: dict[tuple[str, str, int], ByMode] = {}
    for path in sorted(RESULTS.glob(files)):
        for cell in result(path.name)["cells"]:
            modes.setdefault((cell["model"], cell["precision"], cell["batch"]), {})[cell["mode"]] = cell
    return sorted(modes.items(), key=lambda item: _place(*item[0]))


def step_summary() -> str:
    """λCGD's step over ordinary training's, and Opacus's better mode over λCGD's: least and most over the models."""
    over, faster = [], []
    for (model, *_), by_mode in _modes("step-h200-*.json"):
        ours, *peers = (by_mode[name]["median_ms"] for name in ("lambda-cgd", "opacus-hooks", "opacus-ghost"))
        over.append((ours / by_mode["non-private"]["median_ms"], TITLES[model]))
        faster.append((min(peers) / ours, TITLES[model]))
    said = [f"{min(v)[0]:.1f} ({min(v)[1]}) to {max(v)[0]:.1f} ({max(v)[1]})" for v in (over, faster)]
    return f"{said[0]} times ordinary training; Opacus's better mode takes {said[1]} times as long as ours"


def step_table() -> str:
    """One step of every model on the H200: non-private, ours, Opacus."""
    lines = []
    for (model, precision, batch), by_mode in _modes("step-h200-*.json"):
        plain, ours = by_mode["non-private"], by_mode["lambda-cgd"]
        peers = [by_mode[name]["median_ms"] for name in ("opacus-hooks", "opacus-ghost")]
        times = [f"{t:.1f}" for t in (plain["median_ms"], ours["median_ms"])]
        ratios = [f"{ours[field] / plain[field]:.2f}" for field in ("median_ms", "peak_mib")]
        faster = f"{min(peers) / ours['median_ms']:.2f}"
        lines.append([
            TITLES[model], str(batch), _PRECISIONS[precision], *times, *ratios, *(f"{t:.1f}" for t in peers), faster,
        ])  # fmt: skip
    head = ["model", "batch", "precision", "non-private", "λCGD", "ratio", "memory", "Opacus hooks", "Opacus ghost"]
    return _table([*head, "faster by"], lines)


def loop_table() -> str:
    """A loop as users write it over the plain loop with the same sampled batches; memory over that one's."""
    lines = []
    for (model, precision, batch), by_mode in _modes("loop-h200-*.json"):
        plain, ours = by_mode["plain-loop"], by_mode["loop"]
        padded = by_mode.get("padded-loop", {})

        def over(field: str, cell: dict[str, Any], plain: dict[str, Any] = plain) -> str:
            return f"{cell[field] / plain[field]:.2f}" if field in cell and field in plain else ""

        probed = f"{ours['probed_ms']:.0f}" if "probed_ms" in ours else ""
        on_device = " / ".join(f"{c['device_ms']:.1f}" for c in (plain, ours) if "device_ms" in c)
        lines.append([
            TITLES[model], str(batch), _PRECISIONS[precision], f"{plain['median_ms']:.1f}", f"{ours['median_ms']:.1f}",
            over("median_ms", ours), over("median_ms", padded), over("peak_mib", ours), over("reserved_mib", ours),
            over("reserved_mib", padded), on_device, probed,
        ])  # fmt: skip
    head = ["model", "batch", "precision", "plain", "private", "ratio", "padded", "peak", "reserved"]
    return _table([*head, "padded, reserved", "GPU busy, plain / private", "a probed step"], lines)


def _place(model: str, precision: str, batch: int) -> tuple[int, bool, int]:
    """Where a measurement stands in a table."""
    return list(TITLES).index(model), precision == "bf16", -batch


def pair_table() -> str:
    """λCGD's step over DP-SGD's for each model, precision and batch."""
    lines = [
        [TITLES[model], str(batch), _PRECISIONS[precision],
         f"{cell['ratio']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})", str(cell["rounds"])]
        for (model, precision, batch), cell in _pairs().items()
    ]  # fmt: skip
    return _table(["model", "batch", "precision", "λCGD's step over DP-SGD's", "rounds"], lines)


def zoo_support() -> str:
    """How many architectures of the zoo are supported, by us and by Opacus."""
    rows = rows_of("zoo")
    ours, theirs = (sum(row[who] == "yes" for row in rows) for who in ("ours", "opacus"))
    return f"{ours} (Opacus {theirs}) of {len(rows)}"


def accounting_speed() -> str:
    """Uncached plans: CPU seconds, what was chosen and certified, and how loose it may be."""
    head = ["plan", "to the estimate", "to the certificate", "λ", "σ", "RMSE", "chain's share of σ", "slack of δ"]
    lines = []
    rows = {name: row["after"] for name, row in result("accounting-speed.json").items() if name != "machine"}
    for name, row in rows.items():
        soon = row["cpu_seconds_to_the_estimate"]
        lines.append([
            name, "" if soon is None else f"{soon:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['lambda']:.3f}",
            f"{row['sigma']:.5g}", f"{row['rmse']:.2f}", f"{row['dominating_chain_sigma_loss']:.1%}",
            f"{row['slack_share']:.0%}",
        ])  # fmt: skip
    return _table(head, lines)


def exact_accountant() -> str:
    """σ of λCGD with fixed bins by the exact accountant, and CPU seconds."""
    rows = result("exact-accountant-cpu.json")["rows"]
    lines = [[*(f"{row[field]:g}" for field in ("lam", "b", "k", "epsilon")), f"{row['sigma']:.5g}",
              f"{row['cpu_seconds']:.1f}"] for row in rows]  # fmt: skip
    return _table(["λ", "b", "k", "ε", "σ", "CPU s"], lines)


def accountants() -> str:
    """σ and CPU seconds of our accountant and of two peers on the same questions."""
    lines = []
    for row in result("accountants-cpu.json")["rows"]:
        q, ours = row["question"], row["ours"]
        what = f"λCGD {q['lam']:g}" if q["lam"] is not None else f"BISR {q['bands']}"
        peers = [
            f"{peer['sigma']:.4g} ({peer['cpu_seconds']:.0f} s)" if "sigma" in peer else peer["outcome"]
            for peer in row["peers"]
        ]
        lines.append([
            f"{what}, b = {q['b']}, k = {q['k']}, ε = {q['epsilon']:g}, δ = {q['delta']:g}",
            f"{ours['sigma']:.5g} ({ours['cpu_seconds']:.1f} s)", f"{ours['estimate']:.5g}", *peers,
        ])  # fmt: skip
    return _table(["question", "ours", "sampled", "jax_privacy", "Opake"], lines)


def audit_bounds() -> str:
    """The audit's lower bounds with a million canaries, as shares of the claim."""
    rows = {(row["bins"], row["delta"], row["epsilon"]): row for row in result("audit-cpu.json")["rows"]}
    epsilons = sorted({epsilon for _, _, epsilon in rows})
    lines = []
    for bins, delta in dict.fromkeys((bins, delta) for bins, delta, _ in rows):
        at = [rows[bins, delta, epsilon] for epsilon in epsilons]
        shares = [f"{r['share_of_the_claim']:.0%} (ideal {r['share_of_an_ideal_run']:.0%})" for r in at]
        lines.append([f"{bins}, {delta:g}", *shares])
    return _table(["bins, δ (b = 4, k = 3)", *(f"ε = {e:g}" for e in epsilons)], lines)


def nugget() -> str:
    """Certified σ of mechanisms that a chain with a nugget dominates, beside simulation."""
    lines = [
        [row["mechanism"] + ("" if row["b"] == 390 else f", b = {row['b']}, k = {row['k']}"), f"{row['epsilon']:g}",
         f"{row['sigma']:.4g}", f"{row['estimate']:.4g} ± {row['standard_error']:.2g}", f"{row['ratio']:.3f}"]
        for row in result("nugget-cpu.json")["simulated"]
    ]  # fmt: skip
    return _table(["mechanism, fresh bins, δ = 1e-5", "ε", "σ", "simulated σ", "ratio"], lines)


def planned_rmse() -> str:
    """What `lc.plan` makes of one buffer, of bands and of λCGD."""
    rows = {(row["mechanism"], row["epsilon"]): row["rmse"] for row in result("nugget-cpu.json")["planned"]}
    epsilons = sorted({epsilon for _, epsilon in rows}, reverse=True)
    memory = {True: "one model", False: "none"}
    lines = [
        [name, memory["buffer" in name], *(f"{rows[name, epsilon]:.2f}" for epsilon in epsilons)]
        for name in dict.fromkeys(name for name, _ in rows)
    ]
    return _table(["", "memory", *(f"ε = {e:g}" for e in epsilons)], lines)


def accounting_truth() -> str:
    """Certified σ beside independent estimates, and which of them are loose."""
    rows = result("accounting-truth.json")["rows"]
    below = max((row["estimate"] - row["sigma"]) / row["estimate_error"] for row in rows if row["estimate_error"])
    loose = sorted((row for row in rows if row["ratio"] > 1.01), key=lambda row: -row["ratio"])
    said = f"No certified σ lies below its estimate by more than {max(below, 0):.1f} standard errors."
    if loose:
        named = [f"{row['ratio'] - 1:.0%} ({_setting(row)}, b = {row['b']}, k = {row['k']})" for row in loose]
        said += f" More than 1% above it: {', '.join(named)}; {len(rows) - len(loose)} of {len(rows)} are closer."
    head = ["bins", "λ", "b", "k", "ε", "δ", "certified σ", "independent σ", "ratio", "CPU s"]
    lines = []
    for row in rows:
        error = f" ± {row['estimate_error']:.2g}" if row["estimate_error"] else ""
        sampled = " (sampled)" if row["method"] == "monte-carlo" else ""
        bins, lam = _setting(row).split(" ", 1)
        lines.append([
            bins, lam, str(row["b"]), str(row["k"]), f"{row['epsilon']:g}", f"{row['delta']:g}",
            f"{row['sigma']:.6g}{sampled}", f"{row['estimate']:.6g}{error}", f"{row['ratio']:.4f}",
            f"{row['cpu_seconds']:.1f}",
        ])  # fmt: skip
    return _block(f"{said}\n\n{table(head, lines)}")


def _setting(row: dict[str, Any]) -> str:
    return f"{row['bins']} {row['lambda']:g}" + (" normalised" if row["normalized"] else "")


def _table(head: list[str], lines: list[list[str]]) -> str:
    return _block(table(head, lines))


def experiments() -> str:
    """Every experiment's page up to ``MORE``, with its plot, in the order of ``python -m reproduce --list``."""
    parts = []
    said = verdicts()
    for name, (_, what) in EXPERIMENTS.items():
        parts.append(f"## `{name}`: {what.partition(' (needs')[0]}")
        page = RESULTS / name / f"{name}.md"
        if not page.exists():
            parts.append(f"Not run here yet: `python -m reproduce {name}`.")
            continue
        verdict = said.get(f"{name}/{name}.json", "")
        if verdict.startswith("stale"):
            parts.append(f"**Stale**: of what this was made with, today's code has another {verdict[7:]}.")
        _, _, body = page.read_text().partition("\n")
        shown, more, _ = body.strip().partition(MORE)
        if more:
            shown += f"{body.strip().splitlines()[-1]} More: `results/{name}/{name}.md`."
        shown = shown.replace(f"({name}.svg)", f"(figures/{name}.svg)")
        parts.append(re.sub(r"^#", "###", shown, flags=re.M))  # headings of a page go below its own
    return _block("\n\n".join(parts))


def record_page() -> str:
    """What the record's page shows, or that nothing was tested yet."""
    page = RESULTS / "record" / "record.md"
    if not page.exists():
        return _block("No search has come to its test runs yet: `python -m reproduce record` goes on with them.")
    shown, _, rest = page.read_text().partition("\n")[2].strip().partition(MORE)
    last = [rest.strip().splitlines()[-1]] if rest.strip() else []
    return _block("\n\n".join([shown.strip(), *last]))


def record_claim() -> str:
    """How far a linear layer over drawn patches comes, and what the noise has to do with it."""
    rows = [row for row in rows_of("record") if row["model"] == "linear" and record.BY_NAME[row["recipe"]].drawn]
    tops = [(e, row) for e in record.GOALS if (row := record.best(rows, e, drawn=True))]
    *most, last = [f"{_percent(row)} at ε = {e:g}" for e, row in tops]
    ours, theirs = (
        {(row["recipe"], row["epsilon"]): row["test"] for row in rows if row["method"] == name}
        for name in (frontier.OURS, frontier.DP_SGD)
    )
    apart = max(abs(ours[place] - theirs[place]) for place in ours.keys() & theirs.keys())
    return _block(
        "**Features decide more than the mechanism**: a linear layer over patches of images that a program drew, no "
        f"photograph among them, has {', '.join(most)} and {last} on CIFAR-10 (`record`; the row best on validation, "
        f"{len(rows[0]['scores'])} seeds). Over such features normalised λCGD and DP-SGD "
        f"are within {100 * apart:.1f} points of each other at every ε."
    )


def _block(text: str) -> str:
    return f"\n\n{text}\n\n"


NUMBERS: dict[str, Callable[[], str]] = {
    "noise-over-opacus": noise_over_opacus,
    "noise-extra-memory": noise_extra_memory,
    "noise-table": noise_table,
    "captured-epochs": captured_epochs,
    "captured-summary": captured_summary,
    "accounting-speed": accounting_speed,
    "accountants": accountants,
    "accounting-truth": accounting_truth,
    "audit-bounds": audit_bounds,
    "nugget": nugget,
    "planned-rmse": planned_rmse,
    "exact-accountant": exact_accountant,
    "without-a-search": without_a_search,
    "rmse-ratios": rmse_ratios,
    "runtime-summary": runtime_summary,
    "buffer-summary": buffer_summary,
    "readme-results": readme_results,
    "lower-noise": lower_noise_table,
    "fine-tuned": fine_tuned,
    "frontier-claim": frontier_claim,
    "frontier-table": frontier_table,
    "against-us": against_us,
    "searches-at-the-edge": searches_at_the_edge,
    "record": record_page,
    "record-claim": record_claim,
    "literature": lambda: _block(LITERATURE),
    "not-reproduced": not_reproduced,
    "contradictions": contradictions,
    "stale": stale_results,
    "fresh-accuracy": fresh_accuracy,
    "step-summary": step_summary,
    "step-table": step_table,
    "loop-table": loop_table,
    "pair-table": pair_table,
    "zoo-support": zoo_support,
    "experiments": experiments,
}


def written(text: str) -> str:
    """A page with its numbers as ``results/`` has them now."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in NUMBERS:
            raise SystemExit(f"there are no numbers called {match[2]}; known: {', '.join(NUMBERS)}")
        return match[1] + NUMBERS[match[2]]() + match[4]

    if text.count("<!-- numbers:") != len(PLACE.findall(text)):
        raise SystemExit("a place for numbers has no end")
    return PLACE.sub(fill, text)


def changes() -> dict[Path, bytes]:
    """Every file that is not what ``results/`` says, with what it should be."""
    stale: dict[Path, bytes] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        try:
            new = written(page.read_text()).encode()
        except SystemExit as error:
            raise SystemExit(f"{page.relative_to(ROOT)}: {error}") from None
        if new != page.read_bytes():
            stale[page] = new
    for name in EXPERIMENTS:
        plot, copy = RESULTS / name / f"{name}.svg", FIGURES / f"{name}.svg"
        if plot.exists() and (not copy.exists() or copy.read_bytes() != plot.read_bytes()):
            stale[copy] = plot.read_bytes()
    return stale


def numbers(
    check: Annotated[bool, flag("--check", help="Change nothing, and fail if something would change.")] = False,
) -> None:
    """Write the numbers in README and docs, and the plots there, from results/."""
    stale = changes()
    for path, content in stale.items():
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if check and stale:
        raise typer.Exit(1)
