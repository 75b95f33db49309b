"""Questions about a run that nobody has to train: its ε, the noise for a budget, mechanisms side by side; and whether a
claim holds: σ of a plan file or of a release, certified anew, believing no cache and no digest.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

from lambdacgd import cache
from lambdacgd.accounting import Accountant, Certificate, accountant_for
from lambdacgd.accounting.certificate import DELTA_SHARE, claimed_epsilon, progress
from lambdacgd.accounting.poisson import PoissonSampled
from lambdacgd.choosing import MOST_BANDS
from lambdacgd.errors import AccountingError, InvalidInput, brief, integer, number, shown
from lambdacgd.files import read_json
from lambdacgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    PREFIX_SUM,
    BandInvMF,
    BandMF,
    GammaBIFR,
    Identity,
    LambdaCGD,
    Mechanism,
    Objective,
    Workload,
    mechanism_from_dict,
)
from lambdacgd.planning import FIRST_FORMAT, FORMAT, Plan, real_budget
from lambdacgd.planning import plan as make_plan
from lambdacgd.sampling import BallsInBins, Poisson, Sampling, sampling_from_dict

CARD = "privacy-card.json"
ROUNDING = 1e-9  # relative, of δ: the same sums on another machine


def epsilon(
    plan: Plan | None = None,
    *,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    sampling_rate: float | None = None,
    steps: int | None = None,
) -> float:
    """Compute the ε of a run: one by a plan, or DP-SGD with Poisson sampling, as Opacus trains it.

    Args:
        plan: a plan of any mechanism and sampling. The answer is what a plan of the same mechanism, sampling and σ
            claims at ``delta``, which may be another δ than the plan's.
        delta: δ. With a plan it may be left out: then it is the plan's.
        noise_multiplier: σ, relative to the clipping norm. With a plan it may be left out: then it is the plan's.
        sampling_rate: q, the probability that an example takes part in a step; in Opacus, 1 / len(data_loader).
        steps: how many steps were taken.

    Returns:
        The smallest ε that is certified, an upper bound.

    Raises:
        InvalidInput: an argument cannot be used, or neither a plan nor rate, steps and noise are given.
        AccountingError: no ε can be certified for so little noise.

    Guarantee
    ---------
    (ε, δ)-DP for zero-out of one example, both directions, if every example took part in every step with probability
    ``sampling_rate``, independently: *Poisson sampling*. A loader that shuffles does not draw like that, and the answer
    does not hold for it. Without a plan the answer is about real numbers. With one, it is what a plan at ``delta``
    claims, floating point included; a run that was trained already claims its own plan's (ε, δ).

    Examples:
        >>> import lambdacgd as lc
        >>> round(lc.epsilon(sampling_rate=0.05, steps=50, noise_multiplier=1.0, delta=1e-5), 3)
        2.67
    """
    if delta is None and isinstance(plan, Plan):
        delta = plan.delta
    delta = number("delta", delta, above=0, below=1)
    if plan is None and noise_multiplier is None:
        raise InvalidInput("noise_multiplier", "Give the noise multiplier σ of the run, or its plan.")
    accountant = _accountant(plan, sampling_rate, steps)
    if plan is not None and noise_multiplier is None:
        if plan.sigma == 0:
            return math.inf
        noise_multiplier = plan.sigma
    sigma = number("noise_multiplier", noise_multiplier, above=0)
    aside = 0.0 if plan is None else DELTA_SHARE  # of δ: plans set a share aside for floating point
    answer = accountant.epsilon(sigma, delta * (1 - aside)).epsilon
    if not math.isfinite(answer):
        raise AccountingError(f"σ = {sigma:g} has no finite ε at δ = {delta:g}: it is too little noise")
    return answer if plan is None else claimed_epsilon(answer)


def noise_multiplier(
    plan: Plan | None = None,
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float | None = None,
    steps: int | None = None,
) -> float:
    """Compute the noise that a budget needs: for the run of a plan, or for DP-SGD with Poisson sampling.

    Args:
        plan: a plan whose mechanism, sampling and horizon are kept and whose ε and δ are replaced.
        epsilon: ε.
        delta: δ.
        sampling_rate: q, the probability that an example takes part in a step; in Opacus, 1 / len(data_loader).
        steps: how many steps are taken.

    Returns:
        The smallest noise multiplier σ, relative to the clipping norm, that is certified for (ε, δ).

    Raises:
        InvalidInput: an argument cannot be used, or neither a plan nor rate and steps are given.
        AccountingError: nothing can be certified for this budget.

    Guarantee
    ---------
    As for ``lc.epsilon``: without a plan it holds for Poisson sampling, not for a loader that shuffles.

    Examples:
        >>> import lambdacgd as lc
        >>> round(lc.noise_multiplier(sampling_rate=0.05, steps=50, epsilon=2.67, delta=1e-5), 3)
        1.0
    """
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    accountant = _accountant(plan, sampling_rate, steps)
    if plan is None:
        return accountant.sigma(epsilon, delta).sigma
    return accountant.sigma(*real_budget(epsilon, delta)).sigma


def _accountant(plan: Plan | None, sampling_rate: float | None, steps: int | None) -> Accountant | PoissonSampled:
    if plan is not None:
        if not isinstance(plan, Plan):
            raise InvalidInput("plan", f"A plan is what lc.plan returns, and this is {type(plan).__name__}.")
        if sampling_rate is not None or steps is not None:
            raise InvalidInput("plan", "A plan knows its sampling and its steps: leave sampling_rate and steps out.")
        return accountant_for(plan.mechanism, plan.sampling)
    if sampling_rate is None or steps is None:
        raise InvalidInput("sampling_rate", "Give both sampling_rate and steps, or a plan.")
    rate = number("sampling_rate", sampling_rate, above=0, below=1, include=(1,))
    return PoissonSampled(rate, integer("steps", steps))


def compare(
    examples: int | Sized,
    batch_size: int,
    *,
    epochs: int,
    epsilon: float,
    delta: float,
    sampling: Sampling | None = None,
    workload: Workload = PREFIX_SUM,
    steps_per_epoch: int | None = None,
    bands: int | None = None,
    buffers: int = 3,
) -> list[Plan]:
    """Plan the same run with every mechanism, as ``lambdacgd compare`` does.

    The first time may take minutes; a terminal shows the time left.

    Args:
        examples: N, the number of training examples, or a dataset with a length.
        batch_size: the batch size asked for.
        epochs: k, the number of epochs.
        epsilon: ε, finite.
        delta: δ.
        sampling: who takes part when. None means Balls-in-Bins of either kind: all mechanisms with fresh bins, and
            λCGD with fixed ones beside them. With Balls-in-Bins, DP-SGD and BandMF stand there with Poisson sampling
            too.
        workload: what errors are of, as for ``lc.plan``.
        steps_per_epoch: b, if it is not to follow from ``batch_size``.
        bands: of the banded mechanisms; 4, or the steps of a shorter epoch, if not given.
        buffers: of BLT.

    Returns:
        One plan per mechanism, in the order of the table that the command prints. ``plan.rmse`` is what to compare.

    Raises:
        InvalidInput: an argument cannot be used.
        AccountingError: no accountant can answer for these numbers.
    """
    if epsilon == math.inf:
        raise InvalidInput("epsilon", "Without noise all mechanisms are the same: compare at a finite ε.")
    run: dict[str, Any] = {"epochs": epochs, "delta": delta, "workload": workload, "steps_per_epoch": steps_per_epoch}
    planned = functools.partial(make_plan, examples, batch_size, **run)
    # Without noise a plan costs nothing: it checks the request, and says how many steps noise is correlated over.
    free = planned(mechanism=Identity(), sampling=sampling, epsilon=math.inf)
    rows = _rows(sampling, bands=min(4, free.block.steps) if bands is None else bands, buffers=buffers)
    plans = []
    with progress("comparing mechanisms", len(rows)) as tick:
        for mechanism, drawn in rows:
            plans.append(planned(mechanism=mechanism, sampling=drawn, epsilon=epsilon))
            tick(1)
    return plans


def _amplified(bands: int, *, normalized: bool) -> list[Mechanism]:
    """Those whose coefficients are chosen for the amplified RMSE, as far as there are some to choose."""
    buffer = BLT(1, normalized=normalized, amplified=True)
    return [BandInvMF(bands, normalized=normalized, amplified=True), buffer] if 2 <= bands <= MOST_BANDS else [buffer]


def _rows(sampling: Sampling | None, *, bands: int, buffers: int) -> list[tuple[Mechanism, Sampling]]:
    """What ``compare`` sets side by side."""
    banded: tuple[Mechanism, Sampling] = (BandMF("auto"), sampling if isinstance(sampling, Poisson) else Poisson())
    if isinstance(sampling, Poisson):
        return [(Identity(), Poisson()), banded]
    shown = sampling or BallsInBins("fresh")
    best: Objective = "amplified-rmse" if isinstance(shown, BallsInBins) else "rmse"
    mechanisms = [
        Identity(),
        LambdaCGD(objective=best),
        LambdaCGD(normalized=True, objective=best),
        GammaBIFR(bands, objective=best),
        BISR(bands),
        BandInvMF(bands),
        BLT(buffers),
        *(_amplified(bands, normalized=shown.bins == "fresh") if isinstance(shown, BallsInBins) else []),
        BSR(bands),
        BandMF(bands),
    ]
    rows: list[tuple[Mechanism, Sampling]] = [(mechanism, shown) for mechanism in mechanisms]
    if not isinstance(shown, BallsInBins):
        return rows
    if shown.bins == "fixed":
        rows.insert(1, (LambdaCGD(objective="guideline"), shown))
    paper = [(LambdaCGD(objective=best), BallsInBins("fixed"))] if sampling is None else []
    return [(Identity(), Poisson()), banded, *rows, *paper]


# --- does a claim hold? -----------------------------------------------------------------------------------------------


def verify(source: Plan | str | os.PathLike[str]) -> Certificate:
    """Certify σ again, without the cache.

    Args:
        source: A plan, a plan file, a privacy card, or the folder of a release that holds one. Earlier runs that a card
            adds up are taken as it states them; what it claims must be at least their sum.

    Returns:
        The certificate of what is claimed, made now.

    Raises:
        InvalidInput: The file holds neither, it claims nothing, or its σ is too small for what it claims.
        OSError: The file cannot be read.

    Guarantee
    ---------
    If this returns, the accountants of this very installation certify (ε, δ) for the stated mechanism, sampling and σ.
    It says nothing about whether the weights were trained that way.
    """
    if isinstance(source, Plan):
        source.check()
        return _certify("plan", source.mechanism, source.sampling, (source.epsilon, source.delta), source.sigma)
    path = Path(source) / CARD if Path(source).is_dir() else Path(source)
    try:
        data = read_json(path)
        kind = str(data.get("format"))
    except (ValueError, AttributeError) as error:
        raise InvalidInput("source", f"{path} is no plan file and no privacy card ({brief(error)}).") from None
    if kind in (FIRST_FORMAT, FORMAT):
        return verify(Plan.load(path))
    if not kind.startswith("lambdacgd-privacy-card-"):
        raise InvalidInput("source", f"{path} is no plan file and no privacy card: its format is {shown(kind, 40)}.")
    try:
        runs = [(float(run["epsilon"]), float(run["delta"])) for run in (*data["earlier_runs"], data["this_run"])]
        if not all(epsilon >= 0 and 0 <= delta <= 1 for epsilon, delta in runs):
            raise ValueError("an ε is negative, or a δ not in [0, 1]")
        stated, sigma = (float(data["epsilon"]), float(data["delta"])), float(data["sigma"])
        sentence = re.match(r"\(([\d.e+-]+), ([\d.e+-]+)\)-differentially private", data["claim"])
        mechanism, sampling = mechanism_from_dict(data["mechanism"]), sampling_from_dict(data["sampling"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InvalidInput) and error.parameter == "mechanism":
            own = f"{path} is of a mechanism that is not in this package: nothing was verified"
            raise InvalidInput("source", f"{own}. Where you have its class, lc.plan certifies it anew.") from None
        raise InvalidInput("source", f"{path} is not a whole privacy card ({brief(error)}).") from None
    if sentence is not None:  # or it says that nothing is claimed
        for claim in (stated, (float(sentence[1]), float(sentence[2]))):  # in its numbers, and in its sentence
            for name, value, parts in zip("εδ", claim, zip(*runs, strict=True), strict=True):
                least = min(1.0, sum(parts)) if name == "δ" else sum(parts)
                if not value >= least * (1 - ROUNDING):
                    raise InvalidInput("source", f"{path} claims {name} = {value:g}, and its runs add up to {least:g}.")
    return _certify("card", mechanism, sampling, (math.inf, 1.0) if sentence is None else runs[-1], sigma)


def _certify(
    source: str, mechanism: Mechanism, sampling: Sampling, claim: tuple[float, float], sigma: float
) -> Certificate:
    """σ must do with what floating point leaves of the claim."""
    if not math.isfinite(claim[0]):
        raise InvalidInput("source", f"This {source} claims nothing.")
    number("delta", claim[1], above=0, below=1)
    number("sigma", sigma, above=0)
    epsilon, delta = real_budget(*claim)
    try:
        with cache.disabled():
            accountant = accountant_for(mechanism, sampling)
            certificate = accountant.delta(sigma, epsilon)
            least = f"δ = {certificate.delta:.4g} is what its σ = {sigma:.6g} is certified for"
            holds = certificate.delta <= delta * (1 + ROUNDING)
            if not holds and "dominated_by" in certificate.details:  # other columns than the plan's may have answered
                calibration = accountant.sigma(epsilon, delta)
                certificate, holds = calibration.certificate, calibration.sigma <= sigma * (1 + ROUNDING)
                least = f"it needs σ = {calibration.sigma:.6g} and has {sigma:.6g}"
    except AccountingError as error:
        holds, least = False, str(error)
    if not holds:
        raise InvalidInput(
            "source", f"This {source} is false: it claims ε = {claim[0]:g} at δ = {claim[1]:g}, but {least}."
        )
    return replace(certificate, epsilon=claim[0], delta=claim[1])
