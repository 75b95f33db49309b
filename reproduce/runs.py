"""What a training run is, as data: the method, the hyperparameters, the plan it trains under, and what came out.

Results are kept by the digest of the run, plans by what was asked of ``lc.plan``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lambdacgd.accounting.certificate import set_aside
from lambdacgd.cli.options import plan_arguments
from lambdacgd.errors import InvalidInput, integer, number
from lambdacgd.planning import Plan, plan
from lambdacgd.version import __version__
from reproduce.framework import append, machine, records
from reproduce.uncertified import found, plan_of

# The λ that searches begin with, by ε. For fixed bins the paper's; for fresh ones near the smallest error.
_FIXED = MappingProxyType({8.0: 0.95, 4.0: 0.95, 2.0: 0.9, 1.0: 0.9, 0.5: 0.9, 0.25: 0.8})
_FRESH = MappingProxyType({8.0: 0.9, 4.0: 0.9, 2.0: 0.8, 1.0: 0.8, 0.5: 0.8, 0.25: 0.8})
# The λ that a search tries beside it: the paper finds smaller ones better than errors say.
_FIXED_OTHER = MappingProxyType({8.0: 0.9, 4.0: 0.9, 2.0: 0.8, 1.0: 0.8, 0.5: 0.8, 0.25: 0.9})
_FRESH_OTHER = MappingProxyType({8.0: 0.8, 4.0: 0.8, 2.0: 0.9, 1.0: 0.9, 0.5: 0.6, 0.25: 0.6})

Lam = float | Literal["auto"] | None  # "auto": as ``lc.plan`` chooses it; None: the method has no λ


@dataclass(frozen=True)
class Method:
    """A mechanism with a sampling. ``asks`` go to ``lc.plan``; ``lam`` and ``other`` are λ by ε, where it has one."""

    name: str
    title: str
    asks: dict[str, Any]
    ours: bool = False  # not in the paper's comparison
    lam: Mapping[float, float] = field(default_factory=dict)
    other: Mapping[float, float] = field(default_factory=dict)

    def request(self, lam: Lam) -> dict[str, Any]:
        """What is asked of ``lc.plan``, as ``plan_arguments`` reads it."""
        if (lam is not None) != bool(self.lam):
            raise InvalidInput("lam", lam, f"{self.name} {'needs' if self.lam else 'has no'} λ")
        return self.asks | ({} if lam is None else {"lam": lam})

    def first(self, epsilon: float) -> float | None:
        """The λ a search begins with."""
        return _nearest(self.lam, epsilon)

    def second(self, epsilon: float) -> float | None:
        """The λ a search tries beside it."""
        return _nearest(self.other, epsilon)


def _nearest(table: Mapping[float, float], epsilon: float) -> float | None:
    if not table:
        return None
    return table[min(table, key=lambda known: max(known / epsilon, epsilon / known))]


def _binned(mechanism: str, bins: str = "fixed", **more: Any) -> dict[str, Any]:
    return {"mechanism": mechanism, "sampling": "balls-in-bins", "bins": bins} | more


_OURS: dict[str, Any] = {"ours": True}
_FIXED_LAMBDAS: dict[str, Any] = {"lam": _FIXED, "other": _FIXED_OTHER}
_FRESH_LAMBDAS: dict[str, Any] = {"lam": _FRESH, "other": _FRESH_OTHER}
# name, title, what ``lc.plan`` is asked, and more of Method
_METHODS: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("dp-sgd", "DP-SGD (Poisson)", {"mechanism": "dp-sgd", "sampling": "poisson"}, {}),
    ("lambda-cgd-fresh", "DP-λCGD, fresh bins", _binned("lambda-cgd", "fresh"), _OURS | _FRESH_LAMBDAS),
    ("lambda-cgd", "DP-λCGD", _binned("lambda-cgd"), _FIXED_LAMBDAS),
    ("dp-sgd-fresh", "DP-SGD, fresh bins", _binned("dp-sgd", "fresh"), _OURS),
    ("bisr-2", "BISR (p = 2)", _binned("bisr", bands=2), {}),
    ("bisr-16", "BISR (p = 16)", _binned("bisr", bands=16), {}),
    ("bandinvmf-2", "BandInvMF (p = 2)", _binned("bandinvmf", bands=2), {}),
    ("bandinvmf-16", "BandInvMF (p = 16)", _binned("bandinvmf", bands=16), {}),
    ("blt", "BLT (3 buffers)", _binned("blt", buffers=3), {}),
    ("lambda-cgd-normalized", "normalised DP-λCGD", _binned("lambda-cgd", normalized=True), _OURS | _FIXED_LAMBDAS),
    (
        "lambda-cgd-fresh-normalized", "normalised DP-λCGD, fresh bins",
        _binned("lambda-cgd", "fresh", normalized=True), _OURS | _FRESH_LAMBDAS,
    ),
    ("gamma-bifr-4", "γ-BIFR (p = 4)", _binned("gamma-bifr", bands=4, objective="guideline"), _OURS),
    ("bandinvmf-amplified-4", "amplified BandInvMF (p = 4)", _binned("bandinvmf", bands=4, amplified=True), _OURS),
    # BandMF with its best sampler: cyclic Poisson, with as many groups as C has bands, the RMSE's best power of two.
    ("bandmf", "BandMF, cyclic Poisson", {"mechanism": "bandmf", "sampling": "poisson", "bands": "auto"}, {}),
    # No amplification: a fixed order, for the sweeps over λ. λ = 0 is DP-SGD.
    (
        "lambda-cgd-cyclic", "DP-λCGD, no amplification",
        {"mechanism": "lambda-cgd", "sampling": "cyclic"}, {"lam": {1.0: 0.9}},
    ),
)  # fmt: skip
METHODS = {name: Method(name, title, asks, **more) for name, title, asks, more in _METHODS}
LAST_RATE = 0.05  # where a linear schedule ends, as a share of the learning rate
# What might need less noise than the default: no table of methods has them. Plans of a ``variant`` claim nothing.
_VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(
        (name, title, _binned("bandinvmf", "fresh", bands=bands, normalized=True, amplified=True))
        for name, title, bands in (("bands-3", "three normalised bands", 3), ("bands-4", "four normalised bands", 4))
    ),
    *(
        (name, title, _binned("normalized-bands", "fresh", variant=name))
        for name, title in (
            ("epochs", "the default with a σ for each epoch"),
            ("bands-4-epochs", "four normalised bands with a σ for each epoch"),
        )
    ),
    # It stores one buffer of the model's size.
    ("one-buffer", "one buffer, normalised", _binned("blt", "fresh", buffers=1, normalized=True, amplified=True)),
)
VARIANTS = {name: Method(name, title, asks, ours=True) for name, title, asks in _VARIANTS}
# The default with its λ chosen for a rate that falls as runs' rates do; what its plan says of errors is of such a rate.
FALLING = Method(
    "falling-rate", "λ chosen for a falling rate",
    _binned("lambda-cgd", "fresh", normalized=True, schedule="linear", final_rate=LAST_RATE), ours=True,
)  # fmt: skip


def method(name: str) -> Method:
    """The method of that name."""
    known = METHODS | VARIANTS | {FALLING.name: FALLING}
    if name not in known:
        raise InvalidInput("method", name, f"it must be one of {', '.join(known)}")
    return known[name]


Split = Literal["validation", "test"]
Schedule = Literal["constant", "linear"]
Result = dict[str, Any]
DELTA = 1e-5
REVISION = 1  # of the way a run is trained; a change makes older results count for nothing


@dataclass(frozen=True)
class TrainingRun:
    """A run of one method. ``split`` "validation" trains on four fifths of the training set, "test" on all of it.

    ``schedule`` is "constant" or "linear" (to a twentieth). ``examples`` limits the training examples (quick versions;
    None is all). Runs that differ in ``seed`` differ in their initial weights; noise and batches are new in any case.
    """

    task: str
    model: str
    method: str
    epsilon: float
    batch_size: int
    epochs: int
    learning_rate: float
    max_grad_norm: float
    lam: Lam = None
    schedule: Schedule = "constant"
    seed: int = 0
    split: Split = "validation"
    examples: int | None = None

    def __post_init__(self) -> None:
        method(self.method).request(self.lam)
        number("epsilon", self.epsilon, above=0)
        number("learning_rate", self.learning_rate, above=0)
        number("max_grad_norm", self.max_grad_norm, above=0)
        integer("batch_size", self.batch_size)
        integer("epochs", self.epochs)
        if self.split not in ("validation", "test"):
            raise InvalidInput("split", self.split, "it must be validation or test")
        if self.schedule not in ("constant", "linear"):
            raise InvalidInput("schedule", self.schedule, "it must be constant or linear")

    @property
    def digest(self) -> str:
        """What the run's result is found by."""
        text = json.dumps({"run": asdict(self), "revision": REVISION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def plan_request(self, training_examples: int) -> dict[str, Any]:
        """Keyword arguments for ``lc.plan``, given how many examples the split trains on."""
        return {
            "examples": training_examples,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "epsilon": self.epsilon,
            "delta": DELTA,
        } | method(self.method).request(self.lam)

    def __str__(self) -> str:
        lam = "" if self.lam is None else f" λ={self.lam}"
        return (
            f"{self.task} {self.method}{lam} ε={self.epsilon:g} B={self.batch_size} k={self.epochs} "
            f"lr={self.learning_rate:.3g} ζ={self.max_grad_norm:g} {self.schedule} {self.split} seed {self.seed}"
        )


class RunStore:
    """Results of runs in a file of JSON lines, one appended at once when a run ends; several files are read as one."""

    def __init__(self, path: Path | None, *, read: list[Path] | None = None) -> None:
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        for source in [*(read or []), *([path] if path is not None else [])]:
            for record in _records(source):
                self._found[record["digest"]] = record

    def __len__(self) -> int:
        return len(self._found)

    def get(self, run: TrainingRun) -> Result | None:
        """The run's result, if it is there."""
        record = self.record(run)
        return None if record is None else dict(record["result"])

    def record(self, run: TrainingRun) -> dict[str, Any] | None:
        """The run's whole record, with machine and date, if it is there."""
        return self._found.get(run.digest)

    def add(self, run: TrainingRun, result: Result, *, where: dict[str, Any] | None = None) -> None:
        """Keep a result; on disk before this returns."""
        record = {"digest": run.digest, "run": asdict(run), "result": result, "machine": where or machine()}
        record |= {"version": __version__, "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())}
        self._found[run.digest] = record
        if self.path is not None:
            append(self.path, record)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for record in records(path):
        try:
            run = TrainingRun(**record["run"])
        except (ValueError, KeyError, TypeError):  # of another version
            continue
        if record.get("digest") == run.digest and isinstance(record.get("result"), dict):
            yield record


class MissingPlan(InvalidInput):
    """A run whose plan is not in the book."""


class PlanBook:
    """Plans by what was asked of ``lc.plan``, in a file of JSON lines. With ``make`` missing ones are made and added.

    Guarantee
    ---------
    σ is the plan's own: every plan read back is checked against its digest, its request is compared with what it
    holds, and training checks the plan once more. Plans of variants say of themselves that they claim nothing.
    """

    def __init__(self, path: Path | None = None, *, make: bool = False) -> None:
        self.path, self.make = path, make
        self._plans: dict[str, Plan] = {}
        if path is not None:
            for content in records(path):
                known = _read(content)
                if known.certificate.details.get("floating_point") == set_aside(known.epsilon, known.delta):
                    self._plans[_key(content["request"])] = known  # else of an earlier release: nothing trains under it

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, request: dict[str, Any]) -> bool:
        return _key(request) in self._plans

    def get(self, request: dict[str, Any]) -> Plan:
        """The plan of a request."""
        known = self._plans.get(_key(request))
        if known is None:
            if not self.make:
                raise MissingPlan("plan", _key(request), f"it is not in {self.path}; make it where the accountants are")
            content = _content(request)
            known = self._plans[_key(request)] = _read(content)
            if self.path is not None:
                append(self.path, content)
        _check(request, known)
        return known

    def for_run(self, run: TrainingRun, training_examples: int) -> Plan:
        """The plan that ``run`` trains under."""
        return self.get(run.plan_request(training_examples))


def _content(request: dict[str, Any]) -> dict[str, Any]:
    """A new plan as a line of the file: of a variant, the numbers that its plan is made from."""
    if "variant" in request:
        names = ("variant", "examples", "batch_size", "epochs", "epsilon", "delta")
        return {"request": request, "numbers": found(**{name: request[name] for name in names})}
    return {"request": request, "plan": plan(**plan_arguments(request)).to_dict()}


def _read(content: dict[str, Any]) -> Plan:
    if "numbers" in content:
        return plan_of(content["request"], content["numbers"])
    return Plan.from_json(json.dumps(content["plan"]))


def _check(request: dict[str, Any], made: Plan) -> None:
    held = {name: getattr(made, name) for name in ("examples", "epochs", "epsilon", "delta")}
    for name, value in (held | {"batch_size": made.requested_batch_size}).items():
        if value != request[name]:
            raise InvalidInput(name, value, f"the plan was asked for {request[name]}; make it anew")
    sampling = made.sampling.to_dict()
    same = made.mechanism.name == request["mechanism"] and sampling["name"] == request["sampling"]
    same &= sampling.get("bins") == request.get("bins")
    if request.get("lam", "auto") != "auto":
        same &= made.mechanism.to_dict().get("lam") == request["lam"]
    if not same:
        raise InvalidInput("plan", made.digest[:12], "it is not what was asked for; make it anew")


def _key(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)
