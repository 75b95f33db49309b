"""What may be claimed about released weights, and what cannot be: the privacy card and what it is made of.

The card is written for machines (JSON) and for people (Markdown). It holds public facts only: training loss, norms,
batch sizes, bins, the key and anything computed from it never enter it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lambdacgd.accounting import Certificate, accountant_for
from lambdacgd.accounting.certificate import DELTA_SHARE, set_aside
from lambdacgd.accounting.floating_point import FloatingPointCost
from lambdacgd.accounting.gaussian import gaussian_epsilon
from lambdacgd.errors import CheckpointError, InvalidInput, at_least, brief, counted, rounded_up
from lambdacgd.files import read_json, write_new
from lambdacgd.planning import Plan, html_table, plain
from lambdacgd.sampling import BallsInBins
from lambdacgd.version import __version__

FORMAT = "lambdacgd-privacy-card-1"
CARD_JSON, CARD_MARKDOWN = "privacy-card.json", "PRIVACY.md"
PUBLIC = 0o666  # of files that are released: whoever the user's umask lets read them

NOT_COVERED = (
    "choosing hyperparameters, stopping times or models by looking at the private data",
    "training loss, per-example norms, drawn batch sizes and bins, which operators may have seen",
    "frozen parameters and buffers, which are released as they are: no noise protects what was written to them",
    "whoever holds the secret key: with it the noise can be subtracted",
)

LOSS_CHECKED = "checked on a few examples: each one's gradient is the same whatever the others are"
LOSS_NOT_CHECKED = "not checked: the claim needs a loss that adds examples up; privatize(…, loss=…) looks at it"

KEY_FOR_TESTS = "none: trained with a key for tests (SecretKey.for_tests), which everybody can compute"
FLOATING_POINT = "in ε and δ: released numbers are this close to those of real-valued noise, by docs/noise-proof.md"
NOT_DECLARED = "what these weights went through before this run was not declared"

#: What `privatize` takes as one of its ``earlier`` cards: the card itself, its file, or the folder of an export.
GivenCard = Mapping[str, Any] | str | os.PathLike[str]


# --- what a run costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """The claim of a run. Releasing its weights after any number of steps costs the plan's (ε, δ), no less.

    ``after_epochs`` (on request) is informational: the ε that the same σ would give a run *planned* for 1, 2, …
    epochs. With fixed bins it is not what stopping early costs. With fresh bins, whose epochs compose, it is what the
    weights after so many whole epochs have cost, provided that the private data had no say in when to stop.
    """

    epsilon: float
    delta: float
    certificate: Certificate
    steps_taken: int
    steps: int
    after_epochs: tuple[float, ...] | None = None
    key_for_tests: bool = False

    @property
    def share(self) -> float:
        """The share of the plan's steps that were taken."""
        return self.steps_taken / self.steps

    @property
    def private(self) -> bool:
        """Whether anything is claimed: not for ε = inf, not with a key for tests."""
        return math.isfinite(self.epsilon) and not self.key_for_tests

    def __repr__(self) -> str:
        """The sentence, also in a notebook: the certificate's details fill a screen."""
        return f"Spent: {self}"

    def __str__(self) -> str:
        if not math.isfinite(self.epsilon):
            return f"NOT PRIVATE (ε = inf, no noise, no clipping), {self.steps_taken} of {self.steps} steps"
        what = " (not a claim: the key is one for tests)" if self.key_for_tests else ""
        claim = f"(ε = {at_least(self.epsilon)}, δ = {at_least(self.delta)})"
        return f"{claim}{what}, {self.steps_taken} of {self.steps} steps taken"


def epsilon_after_epochs(plan: Plan) -> tuple[float, ...]:
    """ε at the plan's σ and δ for a run planned over 1, 2, …, k epochs with the same mechanism. Informational."""
    if plan.sigma == 0:
        return (math.inf,) * plan.epochs
    accountant = accountant_for(plan.mechanism, plan.sampling)
    after = accountant.epsilon_after_epochs(plan.sigma, plan.epsilon, plan.delta * (1 - DELTA_SHARE))
    aside = set_aside(plan.epsilon, plan.delta)["epsilon"]  # for floating point
    return (*(epsilon + aside for epsilon in after[:-1]), plan.epsilon)


# --- what the weights went through besides ---------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What a run's weights went through besides its own steps, as far as that is known.

    Attributes:
        runs: (ε, δ) of every earlier private run; ε = inf where one claimed nothing.
        declared: Whether somebody said what the weights went through before: ``runs``, and nothing else private.
        changed: Whether something other than the run's own steps changed the weights between two of them.
    """

    runs: tuple[tuple[float, float], ...] = ()
    declared: bool = False
    changed: bool = False

    @classmethod
    def of(cls, earlier: Iterable[GivenCard] | None) -> History:
        """The history that ``privatize(…, earlier=…)`` declares; None declares nothing.

        Raises:
            InvalidInput: Something given is no privacy card.
        """
        if earlier is None:
            return cls()
        if isinstance(earlier, (str, os.PathLike, Mapping)):
            raise InvalidInput.of_type("earlier", earlier, "a list of cards, also if it is only one")
        runs: list[tuple[float, float]] = []
        declared, changed = True, False
        for given in earlier:
            facts = _read_card(given)
            runs += _runs_of(facts)
            declared &= bool(facts.get("history_declared", False))
            changed |= bool(facts.get("changed_between_steps", False))
        return cls(tuple(runs), declared, changed)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> History:
        """The history that a checkpoint holds."""
        runs = tuple((float(epsilon), float(delta)) for epsilon, delta in saved["runs"])
        return cls(runs, saved["declared"], saved["changed"])

    def resumed(self, saved: History) -> History:
        """What holds when a run declared as ``self`` goes on from a checkpoint whose history is ``saved``.

        Raises:
            CheckpointError: Both name runs, or declare that there were none, and not the same.
        """
        both = (self.runs or self.declared) and (saved.runs or saved.declared)
        if both and self.runs != saved.runs:
            first, now = (counted(len(each.runs), "earlier run") for each in (saved, self))
            raise CheckpointError(f"{first} declared first, {now} now: give the same")
        # A declaration where there was none: whoever gives it vouches for it. The larger list counts.
        runs = max(self.runs, saved.runs, key=len)
        return History(runs, self.declared or saved.declared, self.changed or saved.changed)

    @property
    def text(self) -> str:
        """A sentence for the card."""
        runs = counted(len(self.runs), "earlier run")
        if self.declared:
            return f"{runs}, added up in ε and δ" if self.runs else "declared: no private data"
        return NOT_DECLARED + (f"; {runs} among it, added up in ε and δ" if self.runs else "")


def _read_card(given: GivenCard) -> Mapping[str, Any]:
    """A card, from wherever it is."""
    facts: Any = given
    what: Any = f"a {type(given).__name__}"
    if isinstance(given, (str, os.PathLike)):
        what = path = Path(given)
        try:
            facts = read_json(path / CARD_JSON if path.is_dir() else path)
        except (OSError, ValueError) as error:
            raise InvalidInput("earlier", f"There is no privacy card to be read in {given} ({brief(error)}).") from None
    if not isinstance(facts, Mapping) or facts.get("format") != FORMAT:
        raise InvalidInput(
            "earlier", f"earlier takes cards ({FORMAT}), their files or folders: {what} is none of them."
        )
    return facts


def _runs_of(facts: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(ε, δ) of every run on a card. A card that claims nothing has ε = inf."""
    try:
        entries = [*facts["earlier_runs"], facts["this_run"]]
        runs = [(float(entry["epsilon"]), float(entry["delta"])) for entry in entries]
        if str(facts["claim"]).startswith("none"):
            runs[-1] = (math.inf, runs[-1][1])
        if any(math.isnan(epsilon) or epsilon < 0 or not 0 <= delta <= 1 for epsilon, delta in runs):
            raise ValueError("an ε is negative, or a δ not in [0, 1]")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("earlier", f"This privacy card is damaged ({brief(error)}).") from None
    return runs


# --- the card --------------------------------------------------------------------------------------------------------


def replace_one(plan: Plan) -> tuple[float, float, str]:
    """(ε, δ) for replacing an example by another, and why.

    Without amplification it is the Gaussian mechanism at twice the sensitivity. Otherwise replacing is zeroing one
    example out and putting one in, so (2ε, (1 + e^ε)δ) by group privacy.
    """
    if plan.certificate.method == "analytic":
        real = gaussian_epsilon(plan.sigma / (2 * plan.sensitivity), plan.delta * (1 - DELTA_SHARE))
        if real <= min(3 * plan.epsilon, 20.0):  # what is set aside for floating point covers no more
            return real + set_aside(plan.epsilon, plan.delta)["epsilon"], plan.delta, "twice the sensitivity"
    return _in_and_out(plan.epsilon, plan.delta)


def _in_and_out(epsilon: float, delta: float) -> tuple[float, float, str]:
    delta = min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta)
    return 2 * epsilon, delta, "a bound by group privacy: one example zeroed out, another put in"


class Card(dict[str, Any]):
    """A privacy card: a dictionary of public facts, which JSON can hold, and a table in notebooks."""

    def _repr_html_(self) -> str:
        rows = [*rows_of(self), ("Not covered", "; ".join(self["not_covered"]))]
        return html_table("Privacy card", [(name, str(value)) for name, value in rows])


def card(
    plan: Plan,
    history: History,
    settings: Mapping[str, Any],
    *,
    steps_taken: int,
    floating_point: FloatingPointCost | None,
    loss_checked: bool = False,
    key_for_tests: bool = False,
) -> Card:
    """The privacy card of a run's weights: the facts, in the order in which a person would read them.

    The ε and δ of earlier runs in ``history`` are added to the plan's (basic composition), as if all had read the same
    examples. ``settings`` are those of a `Private`; ``floating_point`` is None where nothing is claimed.
    """
    own = (math.inf if key_for_tests else plan.epsilon, plan.delta)
    runs = [*history.runs, own]
    epsilon, delta = sum(e for e, _ in runs), min(1.0, sum(d for _, d in runs))
    if math.isinf(epsilon):
        replaced = math.inf, 1.0, "no claim"
    else:
        replaced = _in_and_out(epsilon, delta) if history.runs else replace_one(plan)
    # Over what noise is correlated, and how often the examples are dealt out: the claim holds for nothing else.
    correlation = f"within an epoch: bins are redrawn and noise restarts every {plan.restart_every} steps (fresh bins)"
    if plan.restart_every is None:
        dealt = ", bins drawn once and kept (fixed bins)" if isinstance(plan.sampling, BallsInBins) else ""
        correlation = f"over all {plan.steps} steps{dealt}"
    facts = {
        "format": FORMAT,
        "library": f"lambdacgd {__version__}",
        "claim": KEY_FOR_TESTS if key_for_tests else _claim(plan, history),
        "epsilon": epsilon,
        "delta": delta,
        "this_run": {"epsilon": own[0], "delta": own[1]},
        "earlier_runs": [{"epsilon": e, "delta": d} for e, d in history.runs],
        "history": history.text,
        "history_declared": history.declared,
        "changed_between_steps": history.changed,
        "adjacency": "zero-out of one example; the number of examples, of bins and the example ids are public",
        "replace_one": {"epsilon": replaced[0], "delta": replaced[1], "reading": replaced[2]},
        "mechanism": plan.mechanism.to_dict(),
        "sampling": plan.sampling.to_dict(),
        "correlation": correlation,
        "sigma": plan.sigma,
        "max_grad_norm": settings["max_grad_norm"],
        "clipping": settings["clipping_mode"],
        "augmentations": settings["augmentations"],
        "objective": LOSS_CHECKED if loss_checked else LOSS_NOT_CHECKED,
        "batch_size": plan.batch_size,
        "requested_batch_size": plan.requested_batch_size,
        "steps": {"planned": plan.steps, "taken": steps_taken, "note": "the claim is that of all planned steps"},
        "floating_point": floating_point and asdict(floating_point) | {"note": FLOATING_POINT},
        "certificate": plan.certificate.to_dict(),
        "plan_digest": plan.digest,
        "not_covered": list(NOT_COVERED),
    }
    return Card(plain(facts))


def _claim(plan: Plan, history: History) -> str:
    if not math.isfinite(plan.epsilon):
        return "none: trained without noise and clipping, for debugging"
    if any(not math.isfinite(epsilon) for epsilon, _ in history.runs):
        return "none: an earlier run on these weights claimed nothing (ε = inf, or not private at all)"
    own = f"({at_least(plan.epsilon)}, {at_least(plan.delta)})-differentially private"
    if history.changed:
        own += ", provided that what changed the weights between its steps, other than this run, used no private data"
    if not history.runs:
        return own
    epsilon, delta = (sum(parts) for parts in zip(*history.runs, (plan.epsilon, plan.delta), strict=True))
    before = counted(len(history.runs), "earlier run")
    together = f"({at_least(epsilon)}, {at_least(delta)})-differentially private together with {before}"
    return f"{together} on these weights; the last: {own}"


def write_card(facts: dict[str, Any], folder: Path) -> None:
    """Write the card into a folder, for machines and for people. One that is there is replaced."""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows_of(facts))
    rest = "\n".join(f"- {item}" for item in facts["not_covered"])
    page = f"# Privacy card\n\n| | |\n|---|---|\n{table}\n\nNot covered:\n\n{rest}\n"
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    for name, content in ((CARD_JSON, text), (CARD_MARKDOWN, page)):
        (folder / name).unlink(missing_ok=True)
        write_new(folder / name, [content.encode()], mode=PUBLIC)


def rows_of(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a person wants to know of the card, by name."""
    other, steps = facts["replace_one"], facts["steps"]
    drawn, asked = facts["batch_size"], facts["requested_batch_size"]
    batch_size = f"{drawn:.4g}" if drawn == asked else f"{drawn:.4g} ({asked} asked for)"
    return [
        ("Claim", facts["claim"]),
        ("ε, δ", f"{facts['epsilon']}, {facts['delta']}"),
        ("Before this run", facts["history"]),
        ("Adjacency", facts["adjacency"]),
        ("Replace-one", f"ε ≤ {rounded_up(other['epsilon'])}, δ ≤ {rounded_up(other['delta'])} ({other['reading']})"),
        ("Mechanism", _described(facts["mechanism"])),
        ("Sampling", _described(facts["sampling"])),
        ("Correlated noise", facts["correlation"]),
        ("Noise", f"σ = {facts['sigma']:.6g} times the clipping norm {facts['max_grad_norm']} ({facts['clipping']})"),
        ("Expected batch size", batch_size),
        ("Objective", facts["objective"]),
        ("Steps", f"{steps['taken']} of {steps['planned']} ({steps['note']})"),
        ("Floating point", _floating_point(facts["floating_point"])),
        ("Certificate", facts["certificate"]["method"]),
        ("Made by", facts["library"]),
    ]


def _floating_point(cost: dict[str, Any] | None) -> str:
    if cost is None:
        return "no claim"
    return (
        f"covered by ε and δ: rounding and finitely many bits take at most 2 · {rounded_up(cost['epsilon'])} of ε; "
        f"sums with noise are released in multiples of 2^-{cost['fineness']} of the noise's deviation or more"
    )


def _described(parameters: dict[str, Any]) -> str:
    return ", ".join([parameters["name"], *(f"{key} = {value}" for key, value in parameters.items() if key != "name")])
