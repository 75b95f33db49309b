"""The privacy card: what may be claimed about released weights, for machines (JSON) and for people (Markdown).

It holds public facts only. Training loss, norms, batch sizes, bins, the key and anything computed from it never enter
it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from lambdacgd.accounting.gaussian import gaussian_epsilon
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.trained import Trained
from lambdacgd.version import __version__

FORMAT = "lambdacgd-privacy-card-1"

NOT_COVERED = (
    "choosing hyperparameters, stopping times or models by looking at the private data",
    "training loss, per-example norms, drawn batch sizes and bins, which operators may have seen",
    "frozen parameters and buffers, which are released as they were before training",
    "whoever holds the secret key: with it the noise can be subtracted",
    "rounding of sums and noise to floating point",
)


def replace_one(plan: Plan) -> tuple[float, float, str]:
    """(ε, δ) for replacing an example by another, and why.

    Without amplification it is the Gaussian mechanism at twice the sensitivity. Otherwise replacing is zeroing one
    example out and putting one in, so (2ε, (1 + e^ε)δ) by group privacy.
    """
    if not math.isfinite(plan.epsilon):
        return math.inf, 1.0, "no noise"
    if plan.certificate.method == "analytic":
        return gaussian_epsilon(plan.sigma / (2 * plan.sensitivity), plan.delta), plan.delta, "twice the sensitivity"
    return _in_and_out(plan.epsilon, plan.delta)


def _in_and_out(epsilon: float, delta: float) -> tuple[float, float, str]:
    delta = min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta)
    return 2 * epsilon, delta, "a bound by group privacy: one example zeroed out, another put in"


def card(trained: Trained) -> dict[str, Any]:
    """The card of a model trained by ``privatize``.

    Where other runs took steps on the same weights before, ε and δ are sums over all of them (basic composition), as if
    all had read the same examples. Weights that an optimizer outside of the run has changed since have no card.
    """
    if trained.otherwise:
        raise TrainingError(
            "after its private run this model was trained by an optimizer outside of it, so the run's (ε, δ) is not "
            "that of these weights. Export before training on. If the further data was public, save the weights "
            "yourself and keep the card of that export with them"
        )
    plan = trained.plan
    spent = [*trained.earlier, (plan.epsilon, plan.delta)]
    epsilon, delta = sum(e for e, _ in spent), min(1.0, sum(d for _, d in spent))
    if not trained.earlier:
        swapped = replace_one(plan)
    else:
        swapped = _in_and_out(epsilon, delta) if math.isfinite(epsilon) else (math.inf, 1.0, "no claim")
    certificate = plan.certificate.to_dict()
    return {
        "format": FORMAT,
        "library": f"lambdacgd {__version__}",
        "claim": _claim(plan, trained.earlier),
        "epsilon": _finite(epsilon),
        "delta": delta,
        "earlier_runs": [{"epsilon": _finite(e), "delta": d} for e, d in trained.earlier],
        "adjacency": "zero-out of one example; the number of examples, of bins and the example ids are public",
        "replace_one": {"epsilon": _finite(swapped[0]), "delta": swapped[1], "reading": swapped[2]},
        "mechanism": plan.mechanism.to_dict(),
        "sampling": plan.sampling.to_dict(),
        "correlation": _correlation(plan),
        "sigma": plan.sigma,
        "max_grad_norm": _finite(trained.max_grad_norm),
        "clipping": trained.clipping_mode,
        "augmentations": trained.augmentations,
        "batch_size": plan.batch_size,
        "requested_batch_size": plan.requested_batch_size,
        "steps": {
            "planned": plan.steps,
            "taken": trained.steps_taken,
            "note": "the claim is that of all planned steps",
        },
        "certificate": {key: _finite(value) for key, value in certificate.items()},
        "plan_digest": plan.digest,
        "not_covered": list(NOT_COVERED),
    }


def _correlation(plan: Plan) -> str:
    """Over what noise is correlated, and how often the examples are dealt out: the claim holds for nothing else."""
    if plan.restart_every is not None:
        return f"within an epoch: bins are redrawn and noise restarts every {plan.restart_every} steps (fresh bins)"
    dealt = ", bins drawn once and kept (fixed bins)" if isinstance(plan.sampling, BallsInBins) else ""
    return f"over all {plan.steps} steps{dealt}"


def _claim(plan: Plan, earlier: tuple[tuple[float, float], ...]) -> str:
    if not math.isfinite(plan.epsilon):
        return "none: trained without noise and clipping, for debugging"
    if plan.certificate.kind != "bound":
        return "none: the noise was a point estimate, not certified"
    if any(not math.isfinite(epsilon) for epsilon, _ in earlier):
        return "none: an earlier run on these weights claimed nothing (ε = inf, an estimate, or not private at all)"
    sure = (
        ""
        if plan.certificate.confidence == 1
        else f", with confidence {plan.certificate.confidence} in the certificate"
    )
    own = f"({plan.epsilon:g}, {plan.delta:g})-differentially private{sure}"
    if not earlier:
        return own
    epsilon, delta = (sum(parts) for parts in zip(*earlier, (plan.epsilon, plan.delta), strict=True))
    before = f"{len(earlier)} earlier run" + ("s" if len(earlier) > 1 else "")
    return f"({epsilon:g}, {delta:g})-differentially private together with {before} on these weights; the last: {own}"


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rounded_up(value: float | str) -> str:
    """Four digits, never less than the value: a bound must not be rounded down."""
    if isinstance(value, str) or value == 0:
        return str(value)
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit) * unit:.4g}"


def to_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


def to_markdown(facts: dict[str, Any]) -> str:
    """The same facts for people."""
    mechanism, sampling = dict(facts["mechanism"]), dict(facts["sampling"])
    certificate, other, steps = facts["certificate"], facts["replace_one"], facts["steps"]
    rows = [
        ("Claim", facts["claim"]),
        ("ε, δ", f"{facts['epsilon']}, {facts['delta']}"),
        ("Adjacency", facts["adjacency"]),
        ("Replace-one", f"ε ≤ {_rounded_up(other['epsilon'])}, δ ≤ {_rounded_up(other['delta'])} ({other['reading']})"),
        ("Mechanism", _described(mechanism)),
        ("Sampling", _described(sampling)),
        ("Correlated noise", facts["correlation"]),
        ("Noise", f"σ = {facts['sigma']:.6g} times the clipping norm {facts['max_grad_norm']} ({facts['clipping']})"),
        ("Expected batch size", f"{facts['batch_size']:.4g} ({facts['requested_batch_size']} asked for)"),
        ("Steps", f"{steps['taken']} of {steps['planned']} ({steps['note']})"),
        ("Certificate", f"{certificate['method']}, {certificate['kind']}, confidence {certificate['confidence']}"),
        ("Made by", facts["library"]),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    rest = "\n".join(f"- {item}" for item in facts["not_covered"])
    return f"# Privacy card\n\n| | |\n|---|---|\n{table}\n\nNot covered:\n\n{rest}\n"


def _described(parameters: dict[str, Any]) -> str:
    name = parameters.pop("name")
    return name + "".join(f", {key} = {value}" for key, value in parameters.items())
