"""Certify a claim again: σ of a plan file or of a release, computed anew, believing no cache and no digest."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lambdacgd import cache
from lambdacgd.accounting import accountant_for
from lambdacgd.errors import InvalidInput, number
from lambdacgd.mechanisms import Mechanism, mechanism_from_dict
from lambdacgd.planning import FIRST_FORMAT, FORMAT, Plan
from lambdacgd.sampling import Sampling, sampling_from_dict

CARD = "privacy-card.json"
SEARCH = 1e-5  # relative accuracy of the accountants' searches, with room
SAMPLING = 0.02  # how far two certificates by Monte Carlo may lie apart in ε: each has its own random margin


@dataclass(frozen=True)
class Verification:
    """A claim and what the accountant says about its σ now."""

    source: str
    claimed_epsilon: float
    certified_epsilon: float
    delta: float
    sigma: float
    method: str
    confidence: float
    note: str

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def verify(source: Plan | str | os.PathLike[str]) -> Verification:
    """Certify σ again, without the cache.

    Args:
        source: A plan, a plan file, a privacy card, or the folder of a release that holds one.

    Returns:
        What was claimed, and the smallest ε that is certified for its σ now.

    Raises:
        InvalidInput: The file holds neither, it claims nothing, or its σ is too small for what it claims.
        AccountingError: No accountant can answer.
        OSError: The file cannot be read.

    Guarantee
    ---------
    If this returns, the accountants of this very installation certify (ε, δ) for the stated mechanism, sampling and σ:
    surely where the confidence is 1, else with that probability (and to 2% in ε, by which two random certificates may
    differ). It says nothing about whether the weights were trained that way.
    """
    if isinstance(source, Plan):
        source.check()
        bound = source.certificate.kind == "bound"
        return _certify("plan", source.mechanism, source.sampling, source.epsilon, source.delta, source.sigma, bound)
    path = Path(source)
    if path.is_dir():
        path = path / CARD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput("source", str(path), f"it must be a plan file or a privacy card ({error})") from None
    kind = data.get("format") if isinstance(data, dict) else None
    if kind in (FIRST_FORMAT, FORMAT):
        return verify(Plan.load(path))
    if not str(kind).startswith("lambdacgd-privacy-card-"):
        raise InvalidInput("source", str(path), f"it must be a plan file, or a release's folder or {CARD}")
    try:
        claim = data.get("this_run", data)
        epsilon, delta, sigma = float(claim["epsilon"]), float(claim["delta"]), float(data["sigma"])
        mechanism, sampling = mechanism_from_dict(data["mechanism"]), sampling_from_dict(data["sampling"])
        bound, earlier = data["certificate"]["kind"] == "bound", data.get("earlier_runs", [])
        total = float(data["epsilon"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidInput("source", str(path), f"it is not a whole privacy card: {error}") from None
    if total < epsilon:
        raise InvalidInput("source", str(path), f"it claims ε = {total:g}, less than its own run's {epsilon:g}")
    note = f"{len(earlier)} earlier runs are as the card states them: verify their own releases." if earlier else ""
    return _certify("card", mechanism, sampling, epsilon, delta, sigma, bound, note)


def _certify(
    source: str,
    mechanism: Mechanism,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    sigma: float,
    bound: bool,
    note: str = "",
) -> Verification:
    if not bound or not math.isfinite(epsilon):
        raise InvalidInput("source", f"This {source} claims nothing: ε = inf, or σ is a point estimate.")
    number("delta", delta, above=0, below=1)
    number("sigma", sigma, above=0)
    with cache.disabled():
        certificate = accountant_for(mechanism, sampling).epsilon(sigma, delta)
    margin = SEARCH if certificate.confidence == 1 else SAMPLING
    if not certificate.epsilon <= epsilon * (1 + margin):
        raise InvalidInput(
            "source",
            f"This {source} is false: σ = {sigma:g} is certified for ε = {certificate.epsilon:.6g} at δ = {delta:g}, "
            f"not for the ε = {epsilon:g} that it claims.",
        )
    method, confidence = certificate.method, certificate.confidence
    return Verification(source, epsilon, certificate.epsilon, delta, sigma, method, confidence, note)
