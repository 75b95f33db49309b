"""From names and numbers to samplings and mechanisms: what a request means, and what does not apply to what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lambdacgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    MECHANISMS,
    BandInvMF,
    BandMF,
    GammaBIFR,
    Identity,
    LambdaCGD,
    Mechanism,
)
from lambdacgd.sampling import SAMPLINGS, BallsInBins, Bins, Cyclic, Poisson, Sampling
from lambdacgd.validation import InvalidInput, integer

# Sensitivities and errors are sums over columns of n numbers: this many take a few gigabytes.
MOST_STEPS = 100_000_000

# Mechanisms whose fresh bins are certified tightly, and so the default; the others' are through a dominating chain.
FRESH_BY_DEFAULT: tuple[str, ...] = (LambdaCGD.name, Identity.name)

# Which parameters each mechanism is described by; anything else given for it is an error.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "dp-sgd": (),
    "lambda-cgd": ("lam", "normalized", "objective"),
    "bisr": ("bands",),
    "bandinvmf": ("bands", "amplified"),
    "gamma-bifr": ("bands", "gamma", "objective"),
    "blt": ("buffers",),
    "bsr": ("bands",),
    "bandmf": ("bands",),
    "diagonal": (),
}


def default_bins(mechanism: str | Mechanism) -> Bins:
    """The bins of a plan that does not ask for either kind: fresh ones where they are certified tightly."""
    name = mechanism.name if isinstance(mechanism, Mechanism) else mechanism
    return "fresh" if name in FRESH_BY_DEFAULT else "fixed"


def make_sampling(
    name: str,
    examples: int,
    batch_size: int,
    *,
    epochs: int,
    bins: Bins | None = None,
    steps_per_epoch: int | None = None,
) -> Sampling:
    """The sampling called ``name``; an epoch has ⌊examples / batch size⌋ steps unless it is given."""
    if name not in SAMPLINGS:
        raise InvalidInput("sampling", name, f"it must be one of {', '.join(SAMPLINGS)}")
    if bins is not None and name != BallsInBins.name:
        raise InvalidInput("bins", bins, f"it applies to balls-in-bins, not to {name}; leave it out")
    epochs = integer("epochs", epochs)
    if steps_per_epoch is None:
        steps_per_epoch = examples // batch_size
    steps_per_epoch = integer(
        "steps_per_epoch", steps_per_epoch, maximum=examples, why=f" (the number of examples, {examples})"
    )
    if epochs * steps_per_epoch > MOST_STEPS:
        raise InvalidInput(
            "epochs",
            epochs,
            f"with {steps_per_epoch} steps each they exceed the {MOST_STEPS} steps that can be planned",
        )
    if name == Cyclic.name:
        if steps_per_epoch * batch_size > examples:
            most = examples // batch_size
            raise InvalidInput(
                "steps_per_epoch", steps_per_epoch, f"cyclic batches of {batch_size} allow at most {most} an epoch"
            )
        return Cyclic(examples, steps_per_epoch, epochs, batch_size)
    if name == BallsInBins.name:
        return BallsInBins(examples, steps_per_epoch, epochs, "fixed" if bins is None else bins)
    return Poisson(examples, steps_per_epoch, epochs)


def make_mechanism(
    mechanism: str | Mechanism,
    sampling: Sampling,
    *,
    epsilon: float | None,
    delta: float,
    parameters: dict[str, Any],
) -> tuple[Mechanism, dict[str, Any] | None]:
    """The mechanism, resolved over the sampling's block, and how its automatic parameters were chosen.

    Without an ε (a plan from a noise multiplier) those that are chosen for an ε are refused.
    """
    horizon = sampling.block
    if isinstance(mechanism, Mechanism):
        if parameters:
            name = next(iter(parameters))
            raise InvalidInput(name, parameters[name], "it goes with a mechanism's name; this mechanism is complete")
        resolved = mechanism.resolve(horizon)
        _check_one_noise(resolved, horizon.steps)
        return resolved, None
    if mechanism not in PARAMETERS:
        known = ", ".join(MECHANISMS)
        raise InvalidInput("mechanism", mechanism, f"it must be one of {known}, or a Mechanism such as LambdaCGD(0.9)")
    for name, value in parameters.items():
        if name not in PARAMETERS[mechanism]:
            takes = ", ".join(PARAMETERS[mechanism]) or "no parameters"
            raise InvalidInput(name, value, f"it does not apply to {mechanism}, which takes {takes}")
    bands = parameters.get("bands", 4)
    if "bands" in parameters:
        integer(
            "bands", bands, maximum=horizon.steps, why=f" (the steps that noise is correlated over, {horizon.steps})"
        )
    bands = min(bands, horizon.steps)
    if mechanism == LambdaCGD.name:
        return _lambda_cgd(sampling, parameters, epsilon, delta)
    if mechanism == GammaBIFR.name:
        return _gamma_bifr(bands, sampling, parameters, epsilon, delta)
    if mechanism == BandInvMF.name and parameters.get("amplified"):
        return _amplified_band_inv_mf(bands, sampling, epsilon, delta)
    if mechanism == BLT.name:
        return BLT(parameters.get("buffers", 3)).resolve(horizon), None
    banded: dict[str, type[BISR] | type[BSR] | type[BandInvMF] | type[BandMF]]
    banded = {cls.name: cls for cls in (BISR, BSR, BandInvMF, BandMF)}
    if mechanism in banded:
        return banded[mechanism](bands).resolve(horizon), None
    return MECHANISMS[mechanism]().resolve(horizon), None


def _check_one_noise(mechanism: Mechanism, n: int) -> None:
    """Accountants ask for C and C⁻¹, training follows the recurrence: in a class of one's own they may differ."""
    if not mechanism.foreign:
        return
    made = mechanism.recurrence(n)
    told = ((mechanism.strategy(n), made.strategy(n)), (mechanism.noising(n), made.noising(n)))
    if not all(np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in told):
        raise InvalidInput(
            "mechanism",
            mechanism.name,
            "its strategy() and noising() must be those of its recurrence(), which training follows: override "
            "recurrence() alone, and column_scales() where columns are scaled",
        )


def _lambda_cgd(
    sampling: Sampling, parameters: dict[str, Any], epsilon: float | None, delta: float
) -> tuple[Mechanism, dict[str, Any] | None]:
    normalized = parameters.get("normalized", False)
    lam = parameters.get("lam", "auto")
    if lam != "auto":
        _number_or_auto("lam", lam)
        _refuse_objective(parameters, "lam")
        return LambdaCGD(lam, normalized), None
    from lambdacgd.choosing import choose_lambda

    choice = choose_lambda(
        sampling.horizon, normalized=normalized, **_objective("lam", sampling, parameters, epsilon, delta)
    )
    return LambdaCGD(choice.value, normalized), {"parameter": "lambda"} | choice.to_dict()


def _gamma_bifr(
    bands: int, sampling: Sampling, parameters: dict[str, Any], epsilon: float | None, delta: float
) -> tuple[Mechanism, dict[str, Any] | None]:
    gamma = parameters.get("gamma", "auto")
    if gamma != "auto":
        _number_or_auto("gamma", gamma)
        _refuse_objective(parameters, "gamma")
        return GammaBIFR(bands, gamma).resolve(sampling.block), None
    if bands == 1:  # one band is DP-SGD whatever γ: nothing to choose
        return GammaBIFR(bands, 0.0), None
    from lambdacgd.choosing import choose_gamma

    choice = choose_gamma(bands, sampling.horizon, **_objective("gamma", sampling, parameters, epsilon, delta))
    return GammaBIFR(bands, choice.value).resolve(sampling.block), {"parameter": "gamma"} | choice.to_dict()


def _amplified_band_inv_mf(
    bands: int, sampling: Sampling, epsilon: float | None, delta: float
) -> tuple[Mechanism, dict[str, Any] | None]:
    if not isinstance(sampling, BallsInBins) or epsilon is None or math.isinf(epsilon):
        raise InvalidInput("amplified", True, "it needs balls-in-bins and a finite epsilon; nothing else is amplified")
    from lambdacgd.choosing import amplified_band_inv_mf

    found = amplified_band_inv_mf(bands, sampling.horizon, epsilon=epsilon, delta=delta, bins=sampling.bins)
    because = "the bands minimise the root-mean-square error under Balls-in-Bins, the accountant in the loop"
    return found, {"parameter": "coefficients", "objective": "amplified-rmse", "because": because}


def _number_or_auto(parameter: str, value: Any) -> None:
    if isinstance(value, str):
        raise InvalidInput(parameter, value, "it must be a number at least 0 and below 1, or 'auto'")


def _refuse_objective(parameters: dict[str, Any], given: str) -> None:
    if "objective" in parameters:
        raise InvalidInput(
            "objective", parameters["objective"], f"it applies where {given} is auto; leave one of them out"
        )


def _objective(
    chosen: str, sampling: Sampling, parameters: dict[str, Any], epsilon: float | None, delta: float
) -> dict[str, Any]:
    """What an automatic parameter is chosen by: RMSE, amplified with bins; λ with fixed ones by the paper's guideline.

    The guideline corrects the amplified optimum of fixed bins, which lies far above the λ that trains best; that of
    fresh bins is three times lower already, on the scale 1/(1−λ). Nothing is known of γ that asks for it.
    """
    amplified = isinstance(sampling, BallsInBins) and (epsilon is None or math.isfinite(epsilon))
    fresh = sampling.restart_every is not None
    default = ("guideline" if chosen == "lam" and not fresh else "amplified-rmse") if amplified else "rmse"
    objective = parameters.get("objective", default)
    if not amplified and objective in ("amplified-rmse", "guideline"):
        raise InvalidInput("objective", objective, "without amplification it must be rmse or maxse")
    if epsilon is None and objective in ("amplified-rmse", "guideline"):
        raise InvalidInput(
            chosen, "auto", f"{objective} chooses it for an ε; with a noise_multiplier give a number, or objective rmse"
        )
    found = {"objective": objective} | ({"epsilon": epsilon, "delta": delta} if amplified and epsilon else {})
    return found | ({"bins": "fresh"} if fresh else {})
