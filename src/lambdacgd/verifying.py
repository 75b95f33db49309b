"""Certify a claim again: σ of a plan file or of a release, computed anew, believing no cache and no digest."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

from lambdacgd import cache
from lambdacgd.accounting import Certificate, accountant_for
from lambdacgd.errors import AccountingError, InvalidInput, brief, number, shown
from lambdacgd.files import read_json
from lambdacgd.mechanisms import Mechanism, mechanism_from_dict
from lambdacgd.planning import FIRST_FORMAT, FORMAT, Plan, real_budget
from lambdacgd.sampling import Sampling, sampling_from_dict

CARD = "privacy-card.json"
ROUNDING = 1e-9  # relative, of δ: the same sums on another machine


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
        _check_sums(path, runs, stated, (float(sentence[1]), float(sentence[2])))
    return _certify("card", mechanism, sampling, (math.inf, 1.0) if sentence is None else runs[-1], sigma)


def _check_sums(path: Path, runs: list[tuple[float, float]], *claims: tuple[float, float]) -> None:
    """Refuse a card that claims less, in its numbers or in its sentence, than its runs add up to."""
    for claim in claims:
        for name, value, parts in zip("εδ", claim, zip(*runs, strict=True), strict=True):
            least = min(1.0, sum(parts)) if name == "δ" else sum(parts)
            if not value >= least * (1 - ROUNDING):
                raise InvalidInput("source", f"{path} claims {name} = {value:g}, and its runs add up to {least:g}.")


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
