"""Markdown tables and figures without a display, for the pages of experiments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None becomes a dash."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join("—" if one is None else str(one) for one in row) + " |" for row in rows]
    return "\n".join(lines)


def panels(wide: int, tall: int = 1, *, size: tuple[float, float] = (4.0, 3.4), **how: Any) -> tuple[Any, list[Any]]:
    """A figure and its axes in reading order; ``how`` goes to ``Figure.subplots``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * wide, size[1] * tall), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(tall, wide, squeeze=False, **how).reshape(-1))
