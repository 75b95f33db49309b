"""The Plan: what a run will do and what it will cost, fixed before the first step. Training accepts nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lambdacgd.accounting import Calibration, Certificate, accountant_for, check_epsilon, check_scales, methods
from lambdacgd.accounting.certificate import DELTA_SHARE, claimed_epsilon, listening, set_aside
from lambdacgd.choosing import Setting, choose
from lambdacgd.errors import InvalidInput, at_least, brief, counted, integer, number, shown
from lambdacgd.files import parse_json, read_bytes
from lambdacgd.mechanisms import PREFIX_SUM, Horizon, LambdaCGD, Mechanism, Workload, mechanism_from_dict
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.mechanisms.error import error_norms, sensitivity
from lambdacgd.sampling import SAMPLINGS, BallsInBins, Sampling, sampling_from_dict
from lambdacgd.version import __version__

FORMAT = "lambdacgd-plan-2"
FIRST_FORMAT = "lambdacgd-plan-1"
"""Files of this format hold as ``batch_size`` what was asked for, and as ``choice`` what is now ``selection``."""

MOST_STEPS = 100_000_000
"""The longest run that can be planned: sensitivities and errors are sums over columns of n numbers, some gigabytes."""

PATIENCE = 2.0
"""Seconds: what takes longer shows its progress on a terminal."""

_DERIVED = ("steps", "steps_per_epoch", "epochs", "examples", "batch_size")
"""Numbers in a plan file that follow from its sampling. (In the first format the last is what was asked for.)"""

_RESULTS = ("sensitivity", "sigma", "rmse", "maxse")
"""Numbers in a plan file that were computed."""

UNNAMED_KINDS = ("cyclic", "poisson", "balls-in-bins, fixed bins")
"""The samplings of earlier releases whose certificates do not name them."""


@dataclass(frozen=True, repr=False)
class Plan:
    """A mechanism and a sampling with the noise that makes them (ε, δ)-DP, and the reason why. ``lc.plan`` makes one.

    Attributes:
        mechanism: what correlates the noise, resolved. Where the noise restarts every ``restart_every`` steps, C is
            block-diagonal and this describes one ``block``.
        sampling: who takes part when, bound to the data set and the horizon.
        epsilon: ε.
        delta: δ.
        requested_batch_size: the batch size that was asked for; ``batch_size`` is what is drawn on average.
        sensitivity: that of C, for one participation in each epoch.
        sigma: σ, the standard deviation of the noise relative to the clipping norm.
        rmse: (1/√n)‖AC⁻¹‖_F·σ, with A the workload's.
        maxse: ‖AC⁻¹‖_{2→∞}·σ.
        certificate: why σ suffices.
        selection: how automatic parameters were chosen; None if there were none.
        workload: what the errors are of, and automatic parameters were chosen for: plain SGD unless it was given. No
            privacy rests on it.
        version: the release that made the plan. It stays with the plan: a run resumes with the plan it began with.

    Guarantee
    ---------
    If training follows the plan (its sampling, at most its steps, its mechanism, per-example contributions clipped to
    ζ, noise of ζσ), everything it releases is (ε, δ)-DP for zero-out of one example, also as floating-point numbers,
    for which it sets a share of ε and δ aside. Choosing hyperparameters by looking at the data is not covered.
    """

    mechanism: Mechanism
    sampling: Sampling
    epsilon: float
    delta: float
    requested_batch_size: int
    sensitivity: float
    sigma: float
    rmse: float
    maxse: float
    certificate: Certificate
    selection: dict[str, Any] | None = None
    workload: Workload = PREFIX_SUM
    version: str = __version__

    @property
    def examples(self) -> int:
        """N, the number of training examples."""
        return self.sampling.examples

    @property
    def batch_size(self) -> float:
        """How many examples a step draws on average, which sums are divided by: N/b, or the fixed size of ``Cyclic``.

        It differs from ``requested_batch_size`` where that does not divide N, or where b was given.
        """
        return float(self.sampling.batch_size)

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
        content: dict[str, Any] = {"format": FORMAT, "version": self.version}
        content |= {"mechanism": self.mechanism.to_dict(), "sampling": self.sampling.to_dict()}
        content |= {name: plain(getattr(self, name)) for name in ("epsilon", "delta", *_DERIVED)}
        content |= {"requested_batch_size": self.requested_batch_size}
        content |= {name: getattr(self, name) for name in _RESULTS}
        content |= {"certificate": plain(self.certificate.to_dict()), "selection": plain(self.selection)}
        if self.workload != PREFIX_SUM:
            content["workload"] = asdict(self.workload)
        return content | {"digest": _digest(content)}

    @property
    def digest(self) -> str:
        """A public hash of everything in the plan."""
        return str(self.to_dict()["digest"])

    def check(self) -> None:
        """Refuse a plan whose parts do not belong together, because σ, mechanism, horizon, bins, ε or δ changed later.

        The sensitivity and errors were computed from mechanism, horizon and σ together, so a change of one shows. The
        certificate names the kind of sampling, which independent noise would not show (those of earlier releases do
        not, and were never of fresh bins), and a method that certifies this kind. A plan that claims nothing passes.

        Raises:
            InvalidInput: the plan was changed after it was made.
        """
        if self.certificate.kind != "bound":
            return  # claims nothing
        _check_sampling(self.sampling)
        mean, largest = error_norms(self.mechanism, self.steps, self.workload, restart_every=self.restart_every)
        sens = sensitivity(self.mechanism, self.horizon, restart_every=self.restart_every)
        expected = (mean * self.sigma, largest * self.sigma, sens.value)
        stated = (self.rmse, self.maxse, self.sensitivity)
        same = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(expected, stated, strict=True))
        unnamed = self.sampling.kind if self.sampling.kind in UNNAMED_KINDS else None
        same &= self.certificate.details.get("sampling", unnamed) == self.sampling.kind
        same &= self.certificate.method in (methods(self.sampling) if math.isfinite(self.epsilon) else ("none",))
        same &= self.sigma > 0 or math.isinf(self.epsilon)
        if not same or (self.certificate.epsilon, self.certificate.delta) != (self.epsilon, self.delta):
            changed = "The parts of this plan do not belong together: it was changed after it was made. Make a new one."
            raise InvalidInput("plan", changed)

    def __repr__(self) -> str:
        """A small table, which fits a terminal of 80 columns; ``to_json()`` holds everything.

        >>> import lambdacgd as lc
        >>> strong = lc.LambdaCGD(0.9)
        >>> print(lc.plan(1000, 50, epochs=2, epsilon=2.0, delta=1e-5, mechanism=strong, sampling=lc.Cyclic()))
        Plan
          privacy      ε = 2, δ = 1e-05, zero-out of one example
          mechanism    λCGD λ=0.9
          sampling     cyclic
          steps        40: 2 epochs of 20
          examples     1000, about 50 a step
          noise        σ = 6.82969, relative to the clipping norm
          error        RMSE 7.466, MaxSE 8.052 of the sum of gradients
          certificate  analytic
        """
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Plan", *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        return html_table("Plan", self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """What a person wants to know about the plan, as names and values: the lines of its table."""
        certain = ", all drawn: no amplification" if getattr(self.sampling, "rate", 0) == 1 else ""
        rows = [
            ("privacy", f"ε = {at_least(self.epsilon)}, δ = {at_least(self.delta)}, zero-out of one example"),
            ("mechanism", str(self.mechanism)),
            ("sampling", self.sampling.kind + certain),
            ("steps", f"{self.steps}: {counted(self.epochs, 'epoch')} of {self.steps_per_epoch}"),
            ("examples", f"{self.examples}, about {self.described_batch_size} a step"),
            ("noise", f"σ = {self.sigma:.6g}, relative to the clipping norm"),
            ("error", f"RMSE {self.rmse:.4g}, MaxSE {self.maxse:.4g} of the sum of gradients"),
            ("certificate", self._certified_by),
        ]
        if self.workload != PREFIX_SUM:
            rows.insert(-1, ("workload", str(self.workload)))
        if self.selection:
            rows.insert(2, ("chosen", f"{self.selection['parameter']}, by {self.selection['objective']}"))
        return rows

    @property
    def _certified_by(self) -> str:
        """The method; and for plan files of earlier releases, some of which were sampled, how often it fails."""
        failing = 1 - self.certificate.confidence
        return self.certificate.method + (f", fails with probability {failing:.2g}" if failing else "")

    @property
    def described_batch_size(self) -> str:
        """The average batch size in words, with what was asked for where that is another number."""
        drawn = f"{self.batch_size:.1f}".removesuffix(".0")
        requested = self.requested_batch_size
        return drawn if self.batch_size == requested else f"{drawn} ({requested} asked for)"

    def to_json(self) -> str:
        """The plan's file format as text; ``from_json`` reads it back."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which ``Plan.load`` reads back.

        Args:
            path: the file.
        """
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its JSON file.

        Args:
            path: the file, as ``save`` or ``lambdacgd plan --out`` wrote it. Files of the first format load, too.

        Raises:
            InvalidInput: the file does not hold a plan, it was changed after it was made, or its σ was only estimated.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(read_bytes(path))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no plan file {path}: plan.save(path) writes one") from None
        except InvalidInput:
            raise
        except ValueError as error:
            raise InvalidInput("plan", f"{path} is not a plan file: {error}.") from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan from ``to_json``'s text.

        Args:
            text: the plan as JSON.

        Raises:
            InvalidInput: the text is not a plan, it was changed after it was made, or its σ was only estimated.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise InvalidInput("plan", f"This is not a JSON plan file ({error}): {text[:40]!r}") from None
        if not isinstance(data, dict) or data.get("format") not in (FIRST_FORMAT, FORMAT):
            given = shown(data.get("format", "without a format") if isinstance(data, dict) else type(data).__name__)
            raise InvalidInput("plan", f"This is {given}, not a plan file of format {FORMAT}, as plan --out writes it.")
        if data.pop("digest", None) != _digest(data):
            changed = "The plan file was changed after it was made: its digest differs. Make a new plan instead."
            raise InvalidInput("plan", changed)
        first = data["format"] == FIRST_FORMAT
        try:
            certificate = data["certificate"]
            plan = cls(
                mechanism=mechanism_from_dict(data["mechanism"]),
                sampling=sampling_from_dict(data["sampling"]),
                epsilon=number("epsilon", float(data["epsilon"]), above=0, include=(math.inf,)),
                delta=number("delta", data["delta"], above=0, below=1),
                requested_batch_size=data["batch_size" if first else "requested_batch_size"],
                **{name: data[name] for name in _RESULTS},
                certificate=Certificate(**certificate | {"epsilon": float(certificate["epsilon"])}),
                selection=data["choice" if first else "selection"],
                workload=Workload(**data.get("workload", {})),
                version=data["version"],
            )
            if certificate["kind"] != "bound":  # it must say so: silence is not a claim
                raise InvalidInput("plan", "The σ of this plan was estimated and claims nothing: make the plan again.")
            if not plan.mechanism.resolved:
                raise ValueError(f"the parameters of {plan.mechanism.name} are missing")
            integer("steps", plan.steps, maximum=MOST_STEPS, why=", which can be planned")
            integer("requested_batch_size", plan.requested_batch_size, maximum=plan.examples)
            for name in _DERIVED[:-1] if first else _DERIVED:
                if getattr(plan, name) != data[name]:
                    raise ValueError(f"{name} is {shown(data[name])}, and by its sampling {getattr(plan, name)}")
            plan.mechanism.validate(plan.block)
            plan.check()
        except InvalidInput:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {brief(error)}"
            raise InvalidInput("plan", f"The file is not a whole plan ({why}). Make a new plan instead.") from None
        _warn_of_large_delta(plan)
        return plan


@dataclass(frozen=True)
class Progress:
    """What a plan will be, before it is certified: ``sigma`` and ``rmse`` to about 1%, ``seconds`` about what is left.
    It claims nothing."""

    mechanism: Mechanism
    sampling: Sampling
    sigma: float
    rmse: float
    seconds: float


def plan(
    examples: int | Sized,
    batch_size: int,
    *,
    epochs: int,
    epsilon: float | None = None,
    delta: float,
    noise_multiplier: float | None = None,
    mechanism: Mechanism | None = None,
    sampling: Sampling | None = None,
    workload: Workload = PREFIX_SUM,
    steps_per_epoch: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Plan a private training run: choose the mechanism's parameters and the noise that makes it (ε, δ)-DP.

    Args:
        examples: N, the number of training examples, or a dataset with a length.
        batch_size: the batch size asked for. An epoch has b = ⌊N / batch_size⌋ steps, so that a step draws N/b
            examples on average, which is never less: ``Plan.batch_size``.
        epochs: k, the number of epochs.
        epsilon: the privacy budget ε. ``math.inf`` plans a run without noise.
        delta: the privacy budget δ.
        noise_multiplier: σ, relative to the clipping norm, in place of ``epsilon``: then ε is the smallest that is
            certified for it. An automatic λ or γ is chosen for an ε, so here it must be given as a number.
        mechanism: what correlates the noise; ``LambdaCGD("auto", normalized="auto")`` if it is not given: of what needs
            no memory and is certified, what has the smallest RMSE.
        sampling: who takes part when; ``BallsInBins("fresh")`` if it is not given.
        workload: what errors are measured on and automatic parameters are chosen for: plain SGD at a constant rate, or
            ``lc.Workload(schedule="linear")``, say. Optimised coefficients (BandMF, BandInvMF, BLT) remain plain SGD's.
        steps_per_epoch: b, if it is not to follow from ``batch_size``.
        progress: called before σ is certified, with about which σ and RMSE it will be and in about how many seconds.
            By default a terminal shows this, and counts the seconds down, where it takes two of them or longer. Answers
            from the disk cache, and those that take no time, come without.

    Returns:
        The plan, with its mechanism resolved and its sampling bound.

    Raises:
        InvalidInput: an argument cannot be used, or a mechanism has no accountant under this sampling.
        AccountingError: no accountant can answer for these numbers.

    Warns:
        UserWarning: δ is above 1/N, which allows publishing an example outright.

    Examples:
        >>> import lambdacgd as lc
        >>> lc.plan(50_000, 128, epochs=10, epsilon=8.0, delta=1e-5,
        ...         mechanism=lc.LambdaCGD(0.95), sampling=lc.Cyclic()).sigma  # doctest: +ELLIPSIS
        6.0...
    """
    examples = integer("examples", _length(examples))
    of_them = f" (the number of examples, {examples})"
    batch_size = integer("batch_size", batch_size, maximum=examples, why=of_them)
    if (epsilon is None) == (noise_multiplier is None):
        raise InvalidInput("epsilon", "Give either epsilon or noise_multiplier: one follows from the other.")
    if epsilon is not None:
        epsilon = number("epsilon", epsilon, above=0, include=(math.inf,))
    else:
        noise_multiplier = number("noise_multiplier", noise_multiplier, above=0)
    delta = number("delta", delta, above=0, below=1)
    if mechanism is None:
        mechanism = LambdaCGD("auto", normalized="auto")
    if not isinstance(mechanism, Mechanism):
        raise InvalidInput.of_type("mechanism", mechanism, "a mechanism such as lc.LambdaCGD(0.9) or lc.BISR(4)")
    if not isinstance(workload, Workload):
        raise InvalidInput.of_type("workload", workload, "a Workload such as lc.Workload(schedule='linear')")
    sampling = BallsInBins("fresh") if sampling is None else sampling
    _check_sampling(sampling)
    epochs = integer("epochs", epochs)
    steps_per_epoch = examples // batch_size if steps_per_epoch is None else steps_per_epoch
    steps_per_epoch = integer("steps_per_epoch", steps_per_epoch, maximum=examples, why=of_them)
    if epochs * steps_per_epoch > MOST_STEPS:
        why = f"with {steps_per_epoch} steps each they exceed the {MOST_STEPS} steps that can be planned"
        raise InvalidInput("epochs", epochs, why)
    bound = sampling.bind(examples=examples, steps_per_epoch=steps_per_epoch, epochs=epochs, batch_size=batch_size)
    if epsilon is not None:
        check_epsilon(bound, epsilon)
    real, real_delta = real_budget(math.inf if epsilon is None else epsilon, delta)
    setting = Setting(bound, None if epsilon is None else real, real_delta, workload)
    mechanism.validate(bound.block)
    chosen, selection = choose(mechanism, setting)
    resolved = chosen.resolve(bound.block)
    _check_columns(resolved, bound.block.steps)
    bound = bound.fitted(resolved)
    accountant = accountant_for(resolved, bound)
    mean_error, max_error = setting.norms(resolved)

    def tell(sigma: float, seconds: float) -> None:
        answer = Progress(resolved, bound, sigma, mean_error * sigma, seconds)
        if progress is not None:
            progress(answer)
        elif seconds >= PATIENCE:
            display.close()  # what was shown before: some accountants try several ways
            _count_down(answer, display)

    with contextlib.ExitStack() as display, listening(tell):
        if noise_multiplier is None:
            assert epsilon is not None
            calibration = accountant.sigma(real, real_delta)
        else:
            calibration = Calibration(noise_multiplier, accountant.epsilon(noise_multiplier, real_delta))
            epsilon = claimed_epsilon(calibration.certificate.epsilon)
    aside = {"floating_point": set_aside(epsilon, delta)} if math.isfinite(epsilon) else {}
    details = calibration.certificate.details | aside
    certificate = replace(calibration.certificate, epsilon=epsilon, delta=delta, details=details)
    made = Plan(
        mechanism=resolved,
        sampling=bound,
        epsilon=epsilon,
        delta=delta,
        requested_batch_size=batch_size,
        sensitivity=setting.sensitivity(resolved),
        sigma=calibration.sigma,
        rmse=mean_error * calibration.sigma,
        maxse=max_error * calibration.sigma,
        certificate=certificate,
        selection=selection,
        workload=workload,
    )
    _warn_of_large_delta(made)
    return made


def _warn_of_large_delta(plan: Plan) -> None:
    """Where a plan comes from, ``lc.plan`` or a file: training says nothing of it again."""
    if plan.delta * plan.examples > 1 and math.isfinite(plan.epsilon):
        high = f"δ = {plan.delta:g} is above 1/N = {1 / plan.examples:.2g}"
        warnings.warn(f"{high}: it allows publishing an example outright. Plan with a smaller one", stacklevel=3)


def _count_down(answer: Progress, display: contextlib.ExitStack) -> None:
    """On a terminal, show what the plan will be, and about how many seconds are left until it is certified."""
    from rich.console import Console
    from rich.errors import LiveError
    from rich.live import Live
    from rich.text import Text

    console, end = Console(stderr=True), time.monotonic() + answer.seconds

    def line() -> Text:
        seconds = end - time.monotonic()
        left = f"in about {seconds:.0f} s" if seconds >= 0.5 else "soon"
        return Text(f"{answer.mechanism}: σ ≈ {answer.sigma:.3g}, RMSE ≈ {answer.rmse:.3g}, certified {left}")

    if console.is_terminal:
        with contextlib.suppress(LiveError):  # the caller shows a bar of its own
            display.enter_context(Live(get_renderable=line, console=console, refresh_per_second=2, transient=True))


def real_budget(epsilon: float, delta: float) -> tuple[float, float]:
    """What is left of a plan's (ε, δ) for the mechanism in real numbers, of which accountants speak.

    The rest pays for the numbers that a computer has. An infinite ε stays as it is.
    """
    aside = set_aside(epsilon, delta)["epsilon"] if math.isfinite(epsilon) else 0.0
    return epsilon - aside, delta * (1 - DELTA_SHARE)


def _check_sampling(sampling: Any) -> None:
    """Refuse what is no sampling of this package: a class derived from one may draw other batches than it says."""
    if not isinstance(sampling, Sampling):
        raise InvalidInput.of_type("sampling", sampling, "a Sampling such as lc.BallsInBins('fresh')")
    if type(sampling) is not SAMPLINGS.get(sampling.name):
        own = f"No accountant knows which batches {type(sampling).__name__} draws"
        raise InvalidInput("sampling", f"{own}: use lc.BallsInBins, lc.Poisson or lc.Cyclic as they are.")


def _check_columns(mechanism: Mechanism, n: int) -> None:
    """Refuse a user's class whose columns, which accountants ask for, may not be those of its recurrence.

    Training follows the recurrence.
    """
    recurrence = mechanism.recurrence(n)
    if type(recurrence) not in get_args(Recurrence):
        raise InvalidInput(
            "mechanism",
            f"recurrence() of {mechanism.name} must return a BandedInverse, BandedStrategy or BufferedToeplitz "
            f"(of lambdacgd.mechanisms), and it returned a {type(recurrence).__name__}.",
        )
    for name in ("strategy", "noising", "strategy_bands"):
        if getattr(getattr(mechanism, name), "__func__", None) is not getattr(Mechanism, name):
            raise InvalidInput(
                "mechanism",
                f"{mechanism.name} has a {name}() of its own, and training follows its recurrence(): override "
                "recurrence() alone, and column_scales() where columns are scaled.",
            )
    check_scales(mechanism, n)


def plain(value: Any) -> Any:
    """``value`` as strict JSON allows it: infinities become strings, which float() reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns for notebooks."""
    lines = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _length(examples: Any) -> Any:
    """The number of examples of a dataset. What has a length of another kind is refused; numbers pass."""
    if hasattr(examples, "batch_sampler") and hasattr(examples, "dataset"):
        raise InvalidInput("examples", "The length of a DataLoader is a number of batches: pass its dataset.")
    if isinstance(examples, Mapping) and 0 not in examples:
        parts = ", ".join(map(str, list(examples)[:4]))
        raise InvalidInput("examples", f"This is a mapping of {parts}: pass one of its datasets, data['train'], say.")
    if isinstance(examples, Sized) and not isinstance(examples, (str, bytes)):
        return len(examples)
    return examples
