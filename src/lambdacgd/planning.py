"""The Plan: what a run will do and what it will cost, fixed before the first step. Training accepts nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lambdacgd.accounting import Calibration, Certificate, accountant_for, check_epsilon, methods
from lambdacgd.choices import default_bins, make_mechanism, make_sampling
from lambdacgd.mechanisms import Horizon, Mechanism, error_norms, mechanism_from_dict, sensitivity
from lambdacgd.sampling import BallsInBins, Bins, Sampling, sampling_from_dict
from lambdacgd.validation import InvalidInput, integer, number
from lambdacgd.version import __version__

FORMAT = "lambdacgd-plan-1"
Auto = Literal["auto"]


@dataclass(frozen=True)
class Plan:
    """A mechanism and a sampling with the noise that makes them (ε, δ)-DP, and the reason why.

    ``sigma`` is the standard deviation of the noise relative to the clipping norm. ``sensitivity`` is that of C for one
    participation an epoch; ``rmse`` and ``maxse`` are (1/√n)‖AC⁻¹‖_F·σ and ‖AC⁻¹‖_{2→∞}·σ for prefix sums. Where the
    noise restarts every ``restart_every`` steps, C is block-diagonal and ``mechanism`` describes one ``block``.
    ``choice`` records how an automatic parameter was chosen, ``version`` the release that made the plan, which stays
    with it: a run resumes with the plan it began with.

    Guarantee
    ---------
    If training follows the plan (its sampling, at most its steps, its mechanism, per-example contributions clipped to
    ζ, noise of ζσ), everything it releases is (ε, δ)-DP for zero-out of one example, as far as ``certificate`` says:
    surely where its confidence is 1, else with that probability over the accountant's own coin flips. A certificate
    of kind "estimate" claims nothing. Choosing hyperparameters by looking at the data is not covered.
    """

    mechanism: Mechanism
    sampling: Sampling
    epsilon: float
    delta: float
    batch_size: int
    sensitivity: float
    sigma: float
    rmse: float
    maxse: float
    certificate: Certificate
    choice: dict[str, Any] | None = None
    version: str = __version__

    @property
    def examples(self) -> int:
        """N, the number of training examples."""
        return self.sampling.examples

    @property
    def horizon(self) -> Horizon:
        """k epochs of b steps."""
        return self.sampling.horizon

    @property
    def block(self) -> Horizon:
        """The stretch over which noise is correlated: ask the mechanism about ``block.steps``, not ``steps``."""
        return self.sampling.block

    @property
    def restart_every(self) -> int | None:
        """After how many steps the noise forgets its past: b with fresh bins, else never (None)."""
        return self.sampling.restart_every

    @property
    def steps(self) -> int:
        """n = k·b, the steps of the whole run; none beyond them is allowed."""
        return self.horizon.steps

    @property
    def steps_per_epoch(self) -> int:
        """b, the steps of an epoch."""
        return self.horizon.steps_per_epoch

    @property
    def epochs(self) -> int:
        """k, the number of epochs."""
        return self.horizon.epochs

    def to_dict(self) -> dict[str, Any]:
        """The plan's file format: public values only, and a digest that notices edits."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "mechanism": self.mechanism.to_dict(),
            "sampling": self.sampling.to_dict(),
            "epsilon": _plain(self.epsilon),
            "delta": self.delta,
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "examples": self.examples,
            "sensitivity": self.sensitivity,
            "sigma": self.sigma,
            "rmse": self.rmse,
            "maxse": self.maxse,
            "certificate": _plain(self.certificate.to_dict()),
            "choice": _plain(self.choice),
        }
        return content | {"digest": _digest(content)}

    @property
    def digest(self) -> str:
        """A public hash of everything in the plan."""
        return str(self.to_dict()["digest"])

    def check(self) -> None:
        """Refuse a plan whose claim was not made for what it holds: σ, mechanism, horizon, bins, ε or δ changed later.

        The sensitivity and errors were computed from mechanism, horizon and σ together, so a change of one shows. The
        certificate names the kind of sampling, which independent noise would not show (those of earlier releases do
        not, and were never of fresh bins), and a method that certifies this kind.
        """
        if self.certificate.kind != "bound":
            return  # claims nothing
        mean, largest = error_norms(self.mechanism, self.steps, restart_every=self.restart_every)
        sens = sensitivity(self.mechanism, self.horizon, restart_every=self.restart_every)
        expected = (mean * self.sigma, largest * self.sigma, sens.value)
        found = (self.rmse, self.maxse, self.sensitivity)
        same = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(expected, found, strict=True))
        unnamed = self.sampling.kind if self.restart_every is None else None
        same &= self.certificate.details.get("sampling", unnamed) == self.sampling.kind
        same &= self.certificate.method in (methods(self.sampling) if math.isfinite(self.epsilon) else ("none",))
        if not same or (self.certificate.epsilon, self.certificate.delta) != (self.epsilon, self.delta):
            raise InvalidInput(
                "plan",
                self.digest[:12],
                "its parts do not belong together: it was changed after lc.plan made it. Plan anew",
            )

    def __str__(self) -> str:
        """One line for people; ``to_json()`` and ``repr`` hold everything.

        >>> print(plan(examples=1000, batch_size=50, epochs=2, epsilon=2.0, delta=1e-5, lam=0.9, sampling="cyclic"))
        lambda-cgd (lam = 0.9), cyclic: ε = 2, δ = 1e-05, σ = 6.8223,
        2 epochs × 20 steps of about 50 of 1000 examples, RMSE 7.458 (analytic)
        """
        fields = self.mechanism.to_dict().items()
        described = ", ".join(
            k if v is True else f"{k} = {v:.4g}" for k, v in fields if v and isinstance(v, int | float)
        )
        certificate = self.certificate
        claim = certificate.method if certificate.kind == "bound" else f"{certificate.method}, an ESTIMATE"
        return (
            f"{self.mechanism.name}{f' ({described})' if described else ''}, {self.sampling.kind}: "
            f"ε = {self.epsilon:g}, δ = {self.delta:g}, σ = {self.sigma:.5g}, "
            f"{self.epochs} epochs × {self.steps_per_epoch} steps of about {self.batch_size} of {self.examples} "
            f"examples, RMSE {self.rmse:.4g} ({claim})"
        )

    def to_json(self) -> str:
        """The plan's file format as text; ``from_json`` reads it back."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which ``Plan.load`` reads back."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its JSON file; an edited one is refused."""
        return cls.from_json(Path(path).read_text())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from ``to_json``'s text; an edited one is refused."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidInput("plan", text[:40], f"it must be a JSON plan file ({error})") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format", "without a format") if isinstance(data, dict) else type(data).__name__
            raise InvalidInput("plan", found, f"it must be a file of format {FORMAT}: lambdacgd plan --out writes one")
        digest = data.pop("digest", None)
        if digest != _digest(data):
            raise InvalidInput(
                "plan", digest, "the file was changed after it was made (its digest differs); make a new plan instead"
            )
        try:
            plan = cls._from_content(data)
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput("plan", str(error), "the file is not a whole plan; make a new plan instead") from None
        for name in ("sigma", "sensitivity", "rmse", "maxse"):
            number(name, getattr(plan, name), above=0, include=(0,))
        integer("batch_size", plan.batch_size, maximum=plan.examples)
        claimed = (plan.certificate.epsilon, plan.certificate.delta)
        if claimed != (plan.epsilon, plan.delta):
            raise InvalidInput("plan", claimed, f"its certificate must be for ε = {plan.epsilon}, δ = {plan.delta}")
        for name in ("steps", "steps_per_epoch", "epochs", "examples"):
            if getattr(plan, name) != data.get(name):
                raise InvalidInput(name, data.get(name), f"the plan's sampling says {getattr(plan, name)}")
        return plan

    @classmethod
    def _from_content(cls, data: dict[str, Any]) -> Plan:
        certificate = dict(data["certificate"])
        certificate["epsilon"] = float(certificate["epsilon"])
        if "kind" not in certificate:  # silence is not a claim
            raise KeyError("kind")
        return cls(
            mechanism=mechanism_from_dict(data["mechanism"]),
            sampling=sampling_from_dict(data["sampling"]),
            epsilon=float(data["epsilon"]),
            delta=data["delta"],
            batch_size=data["batch_size"],
            sensitivity=data["sensitivity"],
            sigma=data["sigma"],
            rmse=data["rmse"],
            maxse=data["maxse"],
            certificate=Certificate(**certificate),
            choice=data["choice"],
            version=data["version"],
        )


def plan(
    examples: int | Sized,
    batch_size: int,
    *,
    epochs: int,
    epsilon: float | None = None,
    delta: float,
    noise_multiplier: float | None = None,
    mechanism: str | Mechanism = "lambda-cgd",
    sampling: str = "balls-in-bins",
    bins: Bins | None = None,
    steps_per_epoch: int | None = None,
    lam: float | Auto | None = None,
    normalized: bool | None = None,
    bands: int | None = None,
    buffers: int | None = None,
    gamma: float | Auto | None = None,
    amplified: bool | None = None,
    objective: str | None = None,
    estimate: bool = False,
) -> Plan:
    """Plan a private training run: choose the mechanism's parameters and the noise that makes it (ε, δ)-DP.

    Give ``epsilon``, or the other way round ``noise_multiplier`` (σ, relative to the clipping norm): then ε is the
    smallest that is certified for it, and λ or γ must be given, because what they are best at is an ε.

    ``examples`` is the number of training examples, or a dataset with a length. ``mechanism`` is a name, described
    further by the parameters that apply to it, or a ``Mechanism``. λ (and γ) are chosen automatically unless given:
    by ``objective`` ("rmse", "maxse", "amplified-rmse" or "guideline"), which defaults to the amplified RMSE with fresh
    bins, to the guideline with fixed ones and to RMSE without amplification.

    ``bins`` of Balls-in-Bins are "fresh" (redrawn every epoch, and the noise restarts there) or "fixed" (drawn once, as
    in the paper). Not given, they are fresh for λCGD and DP-SGD, which are certified tightly so, and fixed for other
    mechanisms, whose certificate of fresh bins takes more noise than needed.

    >>> plan(examples=50_000, batch_size=128, epochs=10, epsilon=8.0, delta=1e-5,
    ...      lam=0.95, sampling="cyclic").sigma  # doctest: +ELLIPSIS
    6.0...
    """
    examples = integer("examples", _length(examples))
    batch_size = integer("batch_size", batch_size, maximum=examples, why=f" (the number of examples, {examples})")
    if (epsilon is None) == (noise_multiplier is None):
        raise InvalidInput("epsilon", epsilon, "give either epsilon or noise_multiplier: one follows from the other")
    if epsilon is not None:
        epsilon = number("epsilon", epsilon, above=0, include=(math.inf,))
    elif estimate:
        raise InvalidInput("estimate", True, "with a noise_multiplier ε is always certified; leave it out")
    else:
        noise_multiplier = number("noise_multiplier", noise_multiplier, above=0)
    delta = number("delta", delta, above=0, below=1)
    if bins is None and sampling == BallsInBins.name:
        bins = default_bins(mechanism)
    chosen = make_sampling(sampling, examples, batch_size, epochs=epochs, bins=bins, steps_per_epoch=steps_per_epoch)
    if epsilon is not None:
        check_epsilon(chosen, epsilon)
    parameters = {
        "lam": lam,
        "normalized": normalized,
        "bands": bands,
        "buffers": buffers,
        "gamma": gamma,
        "amplified": amplified,
        "objective": objective,
    }
    described, choice = make_mechanism(
        mechanism,
        chosen,
        epsilon=epsilon,
        delta=delta,
        parameters={k: v for k, v in parameters.items() if v is not None},
    )
    if noise_multiplier is None:
        assert epsilon is not None
        calibration = accountant_for(described, chosen).sigma(epsilon, delta, estimate=estimate)
    else:
        certificate = accountant_for(described, chosen).epsilon(noise_multiplier, delta)
        calibration = Calibration(noise_multiplier, certificate)
    mean_error, max_error = error_norms(described, chosen.steps, restart_every=chosen.restart_every)
    return Plan(
        mechanism=described,
        sampling=chosen,
        epsilon=calibration.certificate.epsilon,
        delta=delta,
        batch_size=batch_size,
        sensitivity=sensitivity(described, chosen.horizon, restart_every=chosen.restart_every).value,
        sigma=calibration.sigma,
        rmse=mean_error * calibration.sigma,
        maxse=max_error * calibration.sigma,
        certificate=calibration.certificate,
        choice=choice,
    )


def _plain(value: Any) -> Any:
    """``value`` as strict JSON allows it: infinities become strings, which float() reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _length(examples: Any) -> Any:
    """The number of examples of a dataset. What has a length of another kind is refused; numbers pass."""
    if hasattr(examples, "batch_sampler") and hasattr(examples, "dataset"):
        raise InvalidInput("examples", "a DataLoader", "its length is a number of batches: pass its dataset")
    if isinstance(examples, Mapping) and 0 not in examples:
        parts = ", ".join(map(str, list(examples)[:4]))
        raise InvalidInput("examples", f"a mapping of {parts}", "pass one of its datasets, data['train'], say")
    if isinstance(examples, Sized) and not isinstance(examples, (str, bytes)):
        return len(examples)
    return examples
