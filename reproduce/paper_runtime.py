"""The paper's two runtime tables, as printed (arXiv 2601.22334, appendix): seconds an epoch, mean and ± of each cell.

CIFAR-10: logical batches of 512; CNN, WideResNet-40 and ViT-B/16 on an A100 with 8 CPU cores in physical batches of 64,
ViT-L/16 on an H100 with 64 cores in physical batches of 16 (ViT-H/14: not said). IMDb: logical batches of 128; LSTM,
BERT-tiny and BERT-base on an A100 with 64 cores in physical batches of 64, BERT-large on an H100, 16.
"""

from __future__ import annotations

from dataclasses import dataclass

BANDS = (2, 4, 16)
DP_SGD = "DP-SGD"
VARIANTS = (DP_SGD, *(f"regenerated, {p} bands" for p in BANDS), *(f"CPU buffer, {p} bands" for p in BANDS))


@dataclass(frozen=True)
class Model:
    """A row: the benchmark's name of the model, and (seconds, ±) for each of ``VARIANTS``."""

    title: str
    case: str
    physical: int
    values: tuple[tuple[float, float], ...]

    def value(self, variant: str) -> float | None:
        return self.values[VARIANTS.index(variant)][0] if variant in VARIANTS else None

    def text(self, variant: str) -> str | None:
        if variant not in VARIANTS:
            return None
        mean, spread = self.values[VARIANTS.index(variant)]
        return f"{mean:g} ± {spread:g}"


@dataclass(frozen=True)
class Table:
    """One of the two tables: N examples in logical batches of B."""

    name: str
    what: str
    examples: int
    batch: int
    models: tuple[Model, ...]

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch


def _row(title: str, case: str, physical: int, numbers: str) -> Model:
    pairs = [tuple(map(float, pair.split("±"))) for pair in numbers.split()]
    return Model(title, case, physical, tuple((mean, spread) for mean, spread in pairs))


CIFAR = Table(
    "cifar",
    "CIFAR-10",
    50_000,
    512,
    (
        _row("CNN (0.3M)", "cnn", 64, "18.9±.7 18.8±.7 18.9±.5 20.1±.8 18.6±.7 18.9±.4 19.4±.7"),
        _row(
            "WideResNet-40-4 (9M)",
            "wrn-40-4",
            64,
            "133.7±2.2 133.5±1.2 136.9±1.3 144.1±1.0 143.5±2.3 143.1±1.5 149.6±1.9",
        ),
        _row("ViT-B/16 (86M)", "vit-b", 64, "825.3±1.8 826.9±3.2 829.2±1.7 842.9±2.8 886.9±2.0 897.9±3.0 987.2±.4"),
        _row(
            "ViT-L/16 (307M)",
            "vit-l",
            16,
            "1357.9±1.9 1363.2±4.2 1364.7±4.6 1367.3±2.2 1507.6±3.1 1543.3±6.3 1842.7±12.9",
        ),
        _row(
            "ViT-H/14 (632M)",
            "vit-h",
            16,
            "3252.5±3.8 3275.7±6.2 3288.6±4.6 3290.8±8.5 3544.2±3.1 3598.9±6.7 4068.9±7.2",
        ),
    ),
)

IMDB = Table(
    "imdb",
    "IMDb",
    25_000,
    128,
    (
        _row("LSTM (1M)", "lstm-1m", 64, "310.2±3.8 317.1±1.3 317.7±5.8 318.8±3.6 322.4±3.7 322.8±3.1 325.9±3.0"),
        _row("BERT-tiny", "bert-tiny", 64, "14.6±.3 15.8±.5 15.6±.3 20.8±.6 21.4±.4 22.1±.3 25.8±.4"),
        _row(
            "BERT-base (110M)", "bert-base", 64, "334.3±.8 339.1±.5 342.1±1.6 369.7±1.0 543.3±3.2 554.4±4.8 671.7±4.5"
        ),
        _row(
            "BERT-large (340M)",
            "bert-large",
            16,
            "499.0±.1 508.7±2.0 513.0±1.5 539.2±1.7 846.9±3.2 859.4±3.9 1236.5±17.5",
        ),
    ),
)

TABLES = {table.name: table for table in (CIFAR, IMDB)}
