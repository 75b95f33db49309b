"""``lambdacgd plan --parameters …``: memory and time per step, as a table. Estimates from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from lambdacgd.footprint import Machine
from lambdacgd.footprint_data import MEASURED
from lambdacgd.validation import InvalidInput


def machine(
    parameters: str | None, trainable: str | None, devices: int, tokens: int | None, precision: str
) -> Machine | None:
    """The machine that the options describe; None without ``--parameters``."""
    if parameters is None:
        for name, given in (("trainable", trainable), ("tokens", tokens)):
            if given is not None:
                raise InvalidInput(name, given, "it needs --parameters, the size of the model")
        return None
    return Machine(
        parameters=_count("parameters", parameters),
        devices=devices,
        trainable=None if trainable is None else _count("trainable", trainable),
        tokens=tokens,
        precision=precision,  # type: ignore[arg-type]  # checked by Machine
    )


def _count(name: str, text: str) -> int:
    """7e9 and 7_000_000_000 alike."""
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not 1 <= value < 1e15 or value != int(value):
        raise InvalidInput(name, text, "it must be a whole number of parameters, such as 7e9")
    return int(value)


def table(report: dict[str, Any]) -> Table:
    """One row a mechanism."""
    many = report["machine"]["devices"] > 1
    found = Table(title=_title(report), box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("noise", no_wrap=True)
    for place in ("DDP", "FSDP2") if many else ("memory",):
        found.add_column(place, justify="right", no_wrap=True)
        found.add_column("time", justify="right", no_wrap=True)
    step = report["machine"]["tokens"] is not None
    if step:
        found.add_column("step", justify="right", no_wrap=True)
    for name, row in report["noise"].items():
        cells = [f"{name}, {'regenerated' if row['regenerated'] else 'stored'}"]
        for place in ("replicated", "sharded") if many else ("sharded",):
            cells += [size(row[f"{place}_bytes"]), time(row[f"{place}_ms"])]
        found.add_row(*cells, *([time(row["step_ms"])] if step else []))
    return found


def remarks(report: dict[str, Any]) -> Iterator[str]:
    state, where = report["weights_sums_adam_bytes"], report["machine"]
    shared = f", {size(state['sharded'])} sharded over {where['devices']}" if where["devices"] > 1 else ""
    yield (
        f"Weights, gradient sums and Adam's state in float32: {size(state['replicated'])} a device{shared}. "
        "Activations are not counted."
    )
    source = f"measured on one {report['device']} ({', '.join(report['sources'])})"
    beyond = (
        f", extrapolated beyond the largest model measured ({MEASURED['largest_measured'] / 1e6:.0f}M)"
        if report["extrapolated"]
        else ""
    )
    errors = (MEASURED["regenerated"]["worst_relative_error"], MEASURED["buffered"]["worst_relative_error"])
    yield (
        f"[yellow]These are estimates[/]: {source}{beyond}; fits were off by up to {errors[0]:.0%} (regenerated) and "
        f"{errors[1]:.0%} (stored). Communication is not included."
    )


def _title(report: dict[str, Any]) -> str:
    where = report["machine"]
    trained = "" if where["trainable"] is None else f", {where['trainable']:.3g} trained"
    devices = f"{where['devices']} devices" if where["devices"] > 1 else "1 device"
    return f"{where['parameters']:.3g} parameters{trained}, {devices}: noise per device and step (estimate)"


def size(count: float) -> str:
    """
    >>> size(28e9), size(3e6), size(12.0)
    ('26.1 GiB', '2.86 MiB', '<1 MiB')
    """
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB" if count >= 2**20 else "<1 MiB"


def time(ms: float) -> str:
    """
    >>> time(0.75), time(1234.0)
    ('0.75 ms', '1.23 s')
    """
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"
