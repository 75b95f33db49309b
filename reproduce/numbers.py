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
from reproduce import EXPERIMENTS

ROOT = Path(__file__).parent.parent
RESULTS, FIGURES = ROOT / "results", ROOT / "docs" / "figures"
PLACE = re.compile(r"(<!-- numbers: ([a-z0-9-]+) -->)(.*?)(<!-- end -->)", re.S)
TITLES = {
    "cnn": "CNN", "wrn-40-4": "WideResNet-40-4", "wrn-16-4": "WideResNet-16-4", "vit-b": "ViT-B", "vit-l": "ViT-L",
    "vit-h": "ViT-H", "bert-tiny": "BERT-tiny", "bert-base": "BERT-base", "bert-large": "BERT-large", "lstm": "LSTM",
}  # fmt: skip
LAMBDA_CGD = "regenerated, 2 bands"
_PRECISIONS = {"tf32": "TF32", "bf16": "bfloat16"}


def result(path: str) -> dict[str, Any] | None:
    file = RESULTS / path
    return json.loads(file.read_text()) if file.exists() else None


def experiment(name: str) -> dict[str, Any] | None:
    """What ``python -m reproduce NAME`` wrote, unless it is a quick version."""
    written = result(f"{name}/{name}.json")
    return None if written is None or written["quick"] else written


def _measured(name: str) -> dict[str, Any]:
    content = result(name)
    if content is None:
        raise SystemExit(f"results/{name} is missing")
    return content


def _noise() -> dict[str, dict[str, Any]]:
    models = _measured("noise-h200.json")["models"]
    return {name: models[name] for name in TITLES if name in models}


def noise_over_opacus() -> str:
    """λCGD's two streams over Opacus's one, least and most over the models."""
    ratios = [model["contenders"][LAMBDA_CGD]["over opacus DP-SGD"] for model in _noise().values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def noise_extra_memory() -> str:
    """A bound on the extra memory, in tenths of a MiB."""
    most = max(model["contenders"][LAMBDA_CGD]["extra_mib"] for model in _noise().values())
    return f"{int(10 * most) / 10 + 0.1:.1f} MiB"


def noise_table() -> str:
    head = ("model", "parameters", "copy", "Opacus, DP-SGD", "rewinding, 2 bands", "regenerated λCGD", "over Opacus",
            "4 bands", "16 bands", "buffer on CPU, 2 bands")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]

    def ms(value: float) -> str:
        return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"

    for name, model in _noise().items():
        c = model["contenders"]
        cells = [TITLES[name], f"{model['parameters'] / 1e6:.1f}M"]
        cells += [ms(c[name]["ms"]) for name in ("copy", "opacus DP-SGD", "rewinding generator, 2 bands")]
        cells += [f"**{ms(c[LAMBDA_CGD]['ms'])}**", f"{c[LAMBDA_CGD]['over opacus DP-SGD']:.2f}"]
        others = ("regenerated, 4 bands", "regenerated, 16 bands", "buffers on cpu, 2 bands")
        cells += [ms(c[name]["ms"]) for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    return _block("\n".join(lines))


def captured_epochs() -> str:
    """Ten epochs of the sweeps' CNN, by captured steps and by the plain loop."""
    plain, searching = (_measured(f"captured-h200{mode}.json") for mode in ("", "-cudnn-benchmark"))
    cold, steps, loop = plain["cold"], plain["warm"]["steps"], plain["plain"]["seconds_of_all_steps"]
    return (
        f"{steps} steps took {plain['warm']['seconds']:.1f} s, in the first run of a process {cold['seconds']:.1f} s, "
        f"{cold['until_first_step']:.1f} of them before the first step was done (kernels are compiled, graphs "
        f"captured). The plain loop took {loop:.0f} s, and {searching['plain']['seconds_of_all_steps']:.0f} s with "
        "`torch.backends.cudnn.benchmark`"
    )


def rmse_ratios() -> str:
    """Ours over the printed value, least and most, in groups."""
    computed = experiment("rmse-table")
    if computed is None:
        return _block("Not computed yet.")
    rows = [row for row in computed["rows"] if row["ratio"] is not None and not row["known_slip"]]

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


def _rmse(title: str, epsilon: float) -> float | None:
    computed = experiment("rmse-table")
    rows = computed["rows"] if computed else []
    return next((r["rmse"] for r in rows if r["row"] == title and r["epsilon"] == epsilon and r["amplified"]), None)


def _runtime(part: str = "variants") -> dict[str, dict[str, Any]]:
    """Model -> variants (or another part of the rows), of both tables."""
    tables = (experiment(name) for name in ("runtime-cifar", "runtime-imdb"))
    return {row["model"]: row[part] for computed in tables if computed for row in computed["rows"] if part in row}


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def runtime_summary() -> str:
    """One sentence on both runtime tables, or that they are not there yet."""
    models = _runtime()
    if not models:
        return "not measured yet"
    ours = [v[LAMBDA_CGD]["over_dp_sgd"] for v in models.values() if "over_dp_sgd" in v[LAMBDA_CGD]]
    buffer = [v[f"CPU buffer, {p} bands"].get("over_dp_sgd") for v in models.values() for p in (2, 4, 16)]
    known = [value for value in buffer if value is not None]
    extra = [peaks[LAMBDA_CGD] - peaks["DP-SGD"] for peaks in _runtime("peaks_mib").values()]
    text = f"{_range(ours, '.4f')} of DP-SGD's time an epoch over {len(models)} models"
    more = max(0.0, *extra) if extra else 0.0
    text += (f", at most {more:.1f} MiB more memory" if more >= 0.05 else ", no more memory") if extra else ""
    return text + (f"; a noise buffer on the CPU takes {_range(known, '.2f')}" if known else "")


def readme_results() -> str:
    """The short list in README: only what has been computed."""
    lines = []
    pairs = [(e, _rmse("DP-SGD", e), _rmse("DP-λCGD (λ=0.95)", e)) for e in (8.0, 2.0)]
    if all(a and b for _, a, b in pairs):
        said = ", ".join(f"ε = {e:g}: {b:.1f}, DP-SGD {a:.1f}" for e, a, b in pairs)
        lines.append(
            "- **Error** (RMSE in the paper's setting: 50 000 examples, batches of 128, 10 epochs, δ = 1e-5, fixed "
            f"bins, λ = .95): {said}."
        )
    accuracy = experiment("methods-cifar")
    if accuracy:
        lines += _accuracy(accuracy["rows"])
    if _runtime():
        own = [v[LAMBDA_CGD]["own_over_dp_sgd"] for v in _runtime().values() if "own_over_dp_sgd" in v[LAMBDA_CGD]]
        apart = f" With each variant's own passes timed apart: {_range(own, '.2f')} (a noisy host)." if own else ""
        lines.append(
            f"- **Time** (forward and backward passes, the same code, pooled over variants): λCGD takes "
            f"{runtime_summary()}.{apart}"
        )
    return _block("\n".join(lines) if lines else "Nothing computed yet.")


def _tested(rows: list[dict[str, Any]]) -> dict[tuple[str, float], str]:
    """(method, ε) -> test accuracy in percent, with its standard error."""
    texts = {}
    for row in rows:
        if "test" in row:
            error = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.1f}"
            texts[row["method"], row["epsilon"]] = f"{100 * row['test']:.1f}{error}"
    return texts


_OURS = {
    "lambda-cgd-fresh-normalized": "normalised, fresh bins", "lambda-cgd-fresh": "fresh bins",
    "lambda-cgd": "fixed bins, as in the paper",
}  # fmt: skip


def _accuracy(rows: list[dict[str, Any]]) -> list[str]:
    texts = {place: f"{text}%" for place, text in _tested(rows).items()}
    said = []
    for epsilon in (8.0, 2.0, 0.5):
        ours = [f"{texts[name, epsilon]} ({what})" for name, what in _OURS.items() if (name, epsilon) in texts]
        if ours and ("dp-sgd", epsilon) in texts:
            said.append(f"ε = {epsilon:g}: {', '.join(ours)}; DP-SGD {texts['dp-sgd', epsilon]}")
    about = (
        "CIFAR-10, a CNN of 0.3M parameters, each method's settings chosen by five runs on validation data; mean ± "
        "standard error of three tests"
    )
    return [f"- **Accuracy of λCGD** ({about}):\n  - " + "\n  - ".join(said)] if said else []


def training_summary() -> str:
    """What the training experiments came to: methods beside DP-SGD, and where the best λ of each sweep lies."""
    lines = []
    titles = {"lambda-cgd": "λCGD with fixed bins", "lambda-cgd-fresh-normalized": "normalised λCGD with fresh bins"}
    for name, task in (("methods-cifar", "CIFAR-10"), ("methods-imdb", "IMDb"), ("lstm-imdb", "IMDb with an LSTM")):
        rows = (experiment(name) or {"rows": []})["rows"]
        test = {(row["method"], row["epsilon"]): 100 * row["test"] for row in rows}
        said = []
        for method, title in titles.items():
            over = [test[method, e] - test["dp-sgd", e] for m, e in test if m == method and ("dp-sgd", e) in test]
            if over:
                ahead = sum(value > 0 for value in over)
                said.append(f"{title} is ahead of DP-SGD at {ahead} of {len(over)} ε ({_range(over, '+.1f')} points)")
        if said:
            lines.append(f"- {task}, test accuracy: {', '.join(said)}.")
    for name in ("lambda-sweep", "amplified-sweep", "epochs-sweep"):
        finding = _finding(name, "Against the λ")
        if finding:
            lines.append(f"- `{name}`, best λ a{finding[1:]}")
    return _block("\n".join(lines) if lines else "Nothing computed yet.")


def _finding(name: str, begins: str) -> str | None:
    """A line of "What comes out" on a sweep's page: theory's λ take minutes to compute, the pages have them."""
    page = RESULTS / name / f"{name}.md"
    line = re.search(rf"^- \*\*({begins}.*)$", page.read_text() if page.exists() else "", re.M)
    return line[1].replace("**", "") if line else None


def without_a_search() -> str:
    """What theory's λ and the guideline's lose to the best."""
    return _block(f"> {_finding('amplified-sweep', 'Without a search') or 'Not computed yet.'}")


def fresh_accuracy() -> str:
    """Fresh beside fixed bins on CIFAR-10, with and without correlation."""
    texts = _tested(_measured("methods-cifar/methods-cifar.json")["rows"])
    names = {
        "lambda-cgd-fresh-normalized": "normalised λCGD, fresh bins", "lambda-cgd-fresh": "λCGD, fresh bins",
        "lambda-cgd": "λCGD, fixed bins", "dp-sgd-fresh": "DP-SGD, fresh bins", "dp-sgd": "DP-SGD, Poisson",
    }  # fmt: skip
    epsilons = sorted({epsilon for _, epsilon in texts}, reverse=True)
    lines = [[title, *(texts.get((name, e), "") for e in epsilons)] for name, title in names.items()]
    return _table(["", *(f"ε = {e:g}" for e in epsilons)], lines)


def step_table() -> str:
    """One step of every model on the H200: non-private, ours, Opacus, all from the model's last run."""
    modes: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in ("step-h200-all-modes.json", "step-h200-all-modes-2.json"):
        for cell in _measured(run)["cells"]:
            modes.setdefault((cell["model"], cell["precision"], cell["batch"]), {})[cell["mode"]] = cell
    lines = []
    for (model, precision, batch), by_mode in sorted(modes.items(), key=lambda item: _place(*item[0])):
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


def _place(model: str, precision: str, batch: int) -> tuple[int, bool, int]:
    """Where a measurement stands in a table."""
    return list(TITLES).index(model), precision == "bf16", -batch


def pair_table() -> str:
    """λCGD's step over DP-SGD's, the longest run of each model, precision and batch."""
    longest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in _measured("pair-h200.json")["cells"]:
        place = cell["model"], cell["precision"], cell["batch"]
        if place not in longest or cell["rounds"] > longest[place]["rounds"]:
            longest[place] = cell
    lines = [
        [TITLES[model], str(batch), _PRECISIONS[precision],
         f"{cell['ratio']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})", str(cell["rounds"])]
        for (model, precision, batch), cell in sorted(longest.items(), key=lambda item: _place(*item[0]))
    ]  # fmt: skip
    return _table(["model", "batch", "precision", "λCGD's step over DP-SGD's", "rounds"], lines)


def zoo_support() -> str:
    """How many architectures of the zoo are supported, by us and by Opacus."""
    written = experiment("zoo")
    if written is None:
        raise SystemExit("results/zoo is missing")
    ours, theirs = (sum(row[who] == "yes" for row in written["rows"]) for who in ("ours", "opacus"))
    return f"{ours} (Opacus {theirs}) of {len(written['rows'])}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return _block("\n".join(f"| {' | '.join(row)} |" for row in rows))


def experiments() -> str:
    """Every experiment's page, with its plot, in the order of ``python -m reproduce --list``."""
    parts = []
    for name, (_, what) in EXPERIMENTS.items():
        parts.append(f"## `{name}`: {what}")
        page = RESULTS / name / f"{name}.md"
        if not page.exists():
            parts.append(f"Not run here yet: `python -m reproduce {name}`.")
            continue
        _, _, body = page.read_text().partition("\n")
        body = body.replace(f"({name}.svg)", f"(figures/{name}.svg)")
        parts.append(re.sub(r"^#", "###", body.strip(), flags=re.M))  # headings of a page go below its own
    return _block("\n\n".join(parts))


def _block(text: str) -> str:
    return f"\n\n{text}\n\n"


NUMBERS: dict[str, Callable[[], str]] = {
    "noise-over-opacus": noise_over_opacus,
    "noise-extra-memory": noise_extra_memory,
    "noise-table": noise_table,
    "captured-epochs": captured_epochs,
    "without-a-search": without_a_search,
    "rmse-ratios": rmse_ratios,
    "runtime-summary": runtime_summary,
    "readme-results": readme_results,
    "training-summary": training_summary,
    "fresh-accuracy": fresh_accuracy,
    "step-table": step_table,
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
        new = written(page.read_text()).encode()
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
