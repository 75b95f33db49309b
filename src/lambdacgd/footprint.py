"""What a plan costs on a machine: memory and time of the noise, and of a step, at any model size. Estimates.

Numbers come from ``footprint_data``, which ``benchmarks/footprint.py`` fits to measurements on one H200. Beyond the
largest model measured they are extrapolated: noise is bound by arithmetic and memory, so its time grows with the number
of parameters. Communication between devices and activations are not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lambdacgd.footprint_data import MEASURED
from lambdacgd.mechanisms import BISR, BSR, Identity, LambdaCGD, Mechanism
from lambdacgd.planning import Plan
from lambdacgd.validation import InvalidInput, integer, number

Precision = Literal["bf16", "tf32"]
FLOAT32 = 4
# Of a trainable parameter in float32: weight, gradient sum (which p.grad shares), two moments of Adam.
ADAM_BYTES = 4 * FLOAT32
_TENSORS = 300  # of a transformer of a few dozen layers; buffered noise takes some microseconds for each


@dataclass(frozen=True)
class Machine:
    """``devices`` alike; ``parameters`` of the model, of which ``trainable`` are trained; ``tokens`` an example."""

    parameters: int
    devices: int = 1
    trainable: int | None = None
    tokens: int | None = None
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        integer("parameters", self.parameters)
        integer("devices", self.devices)
        if self.trainable is not None:
            integer("trainable", self.trainable, maximum=self.parameters, why=" (the model's parameters)")
        if self.tokens is not None:
            integer("tokens", self.tokens)
        if self.precision not in MEASURED["steps"]:
            raise InvalidInput("precision", self.precision, f"measured are {', '.join(MEASURED['steps'])}")

    @property
    def noised(self) -> int:
        """Parameters that receive noise."""
        return self.parameters if self.trainable is None else self.trainable


@dataclass(frozen=True)
class Footprint:
    """Per device: bytes and milliseconds of the noise, replicated (DDP) and sharded (FSDP2), and of a whole step.

    ``step_ms`` (None without ``tokens``) is the sharded noise and the device's share of the batch, without
    communication.
    """

    bands: int
    regenerated: bool
    replicated_bytes: float
    sharded_bytes: float
    replicated_ms: float
    sharded_ms: float
    step_ms: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def noise_ms(parameters: float, bands: int, *, regenerated: bool, tensors: int = _TENSORS) -> float:
    """Estimated time of one noise vector with ``bands`` terms over ``parameters`` elements on one device."""
    fit = MEASURED["regenerated" if regenerated else "buffered"]
    fixed = fit["launch_ms"] if regenerated else tensors * fit["tensor_ms"]
    return float(fixed + parameters * (fit["parameter_ms"] + bands * fit["band_ms"]))


def noise_bytes(parameters: float, bands: int, *, regenerated: bool, tensors: int = _TENSORS) -> float:
    """Estimated memory that the noise needs beside weights, sums and optimizer."""
    if regenerated:
        return tensors * float(MEASURED["regenerated"]["tensor_bytes"])
    return FLOAT32 * parameters * (bands + float(MEASURED["buffered"]["vectors_beside_bands"]))


def compute_ms(machine: Machine, batch_size: int) -> float | None:
    """Estimated forward and backward passes with clipping of the device's share of a batch; None without tokens."""
    if machine.tokens is None:
        return None
    rate = MEASURED["steps"][machine.precision]["parameter_token_ms"]
    return float(rate * machine.parameters * machine.tokens * batch_size / machine.devices)


def footprint(machine: Machine, *, bands: int, regenerated: bool, batch_size: int) -> Footprint:
    """Noise of ``bands`` terms, regenerated or kept in buffers, on a machine."""
    number("bands", bands, above=0)
    share = machine.noised / machine.devices
    sharded = noise_ms(share, bands, regenerated=regenerated)
    compute = compute_ms(machine, batch_size)
    return Footprint(
        bands=bands,
        regenerated=regenerated,
        replicated_bytes=noise_bytes(machine.noised, bands, regenerated=regenerated),
        sharded_bytes=noise_bytes(share, bands, regenerated=regenerated),
        replicated_ms=noise_ms(machine.noised, bands, regenerated=regenerated),
        sharded_ms=sharded,
        step_ms=None if compute is None else compute + sharded,
    )


def of_mechanism(machine: Machine, mechanism: Mechanism, *, steps: int, batch_size: int) -> Footprint:
    """The footprint of a mechanism over ``steps`` correlated steps."""
    return footprint(
        machine,
        bands=mechanism.past_vectors(steps) + 1,
        regenerated=mechanism.regenerates(steps),
        batch_size=batch_size,
    )


def compared(plan: Plan) -> Iterable[tuple[str, Mechanism]]:
    """The plan's own mechanism, and others to see it against."""
    yield "this plan", plan.mechanism
    yield "DP-SGD", Identity()
    yield "λCGD", LambdaCGD(0.9)
    yield "BISR p=4", BISR(4)
    yield "BISR p=16", BISR(16)
    yield "BSR p=4", BSR(4)
    yield "BSR p=16", BSR(16)


def report(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Everything that ``lambdacgd plan --parameters …`` prints, as data. Marked as an estimate."""
    steps = plan.block.steps
    rows = {
        name: of_mechanism(machine, mechanism, steps=steps, batch_size=round(plan.batch_size)).to_dict()
        for name, mechanism in compared(plan)
    }
    frozen = machine.parameters - machine.noised
    state = ADAM_BYTES * machine.noised + FLOAT32 * frozen
    return {
        "kind": "estimate",
        "machine": asdict(machine),
        "device": MEASURED["device"],
        "sources": list(MEASURED["sources"]),
        "extrapolated": machine.noised / machine.devices > MEASURED["largest_measured"],
        "weights_sums_adam_bytes": {"replicated": state, "sharded": state / machine.devices},
        "noise": rows,
    }
