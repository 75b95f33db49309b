"""The paper's table of RMSE values, as printed (arXiv 2601.22334, appendix), with its known slips.

Setting: δ = 1e-5, 50 000 examples, batches of 128, so b = 390 steps an epoch, k = 10 epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lambdacgd.mechanisms import BISR, BLT, BSR, BandInvMF, BandMF, Horizon, Identity, LambdaCGD, Mechanism

HORIZON = Horizon(390, 10)
DELTA = 1e-5


@dataclass(frozen=True)
class Column:
    """One column of the table: ε, and whether Balls-in-Bins (Poisson for DP-SGD) amplifies."""

    epsilon: float
    amplified: bool

    @property
    def title(self) -> str:
        return f"ε={self.epsilon:g}" + ("" if self.amplified else " (no amplification)")


COLUMNS = (Column(8.0, False), *(Column(epsilon, True) for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)))


@dataclass(frozen=True)
class Row:
    """One row: the mechanism, its family (for plots), and the printed values."""

    title: str
    family: str
    mechanism: Mechanism
    values: tuple[float, ...]


def _banded(family: str, make: type[BISR | BSR | BandInvMF | BandMF], table: dict[int, tuple[float, ...]]) -> list[Row]:
    return [
        Row(f"{family} (p={'b' if bands == HORIZON.steps_per_epoch else bands})", family, make(bands), values)
        for bands, values in table.items()
    ]


_LAMBDA_CGD = {
    0.975: (12.73, 9.33, 14.03, 21.45, 36.40, 68.37, 125.69),
    0.95: (14.74, 10.27, 15.28, 21.45, 31.70, 56.75, 103.44),
    0.9: (19.72, 13.25, 18.42, 24.73, 33.66, 54.33, 97.73),
}

ROWS: tuple[Row, ...] = (
    *_banded(
        "BandInvMF",
        BandInvMF,
        {
            2: (12.69, 9.70, 14.90, 24.41, 43.66, 82.77, 125.87),
            4: (10.27, 8.07, 12.48, 20.76, 37.37, 70.90, 130.48),
            16: (8.54, 6.56, 11.23, 20.17, 37.09, 71.08, 130.90),
            64: (8.15, 6.39, 11.36, 20.87, 39.13, 74.06, 140.38),
            390: (7.87, 5.66, 9.86, 17.76, 33.25, 62.84, 119.20),
        },
    ),
    Row("BLT", "BLT", BLT(3), (8.14, 5.87, 10.67, 19.50, 35.97, 69.41, 127.69)),
    *(Row(f"DP-λCGD (λ={lam:g})", "DP-λCGD", LambdaCGD(lam), values) for lam, values in _LAMBDA_CGD.items()),
    *_banded(
        "BISR",
        BISR,
        {
            2: (48.45, 30.52, 40.58, 49.44, 58.16, 71.20, 105.09),
            4: (33.47, 21.00, 27.97, 34.87, 42.50, 58.27, 98.52),
            16: (17.95, 11.50, 15.75, 21.10, 20.25, 52.81, 96.45),
            64: (10.50, 6.81, 9.87, 15.92, 28.80, 53.89, 101.90),
            390: (8.45, 6.34, 11.30, 20.77, 38.96, 73.70, 139.68),
        },
    ),
    *_banded(
        "BSR",
        BSR,
        {
            2: (62.51, 39.65, 51.87, 62.97, 74.14, 88.33, 116.43),
            4: (46.80, 29.29, 39.32, 48.13, 57.03, 70.47, 104.90),
            16: (26.27, 16.88, 22.41, 28.59, 36.78, 55.03, 97.09),
            64: (14.89, 9.62, 13.32, 18.88, 29.34, 52.16, 97.51),
            390: (8.15, 5.49, 9.31, 17.06, 31.95, 60.43, 114.52),
        },
    ),
    *_banded(
        "BandMF",
        BandMF,
        {
            2: (59.44, 37.67, 49.08, 59.95, 71.17, 86.25, 114.94),
            4: (42.29, 27.00, 36.99, 45.90, 55.35, 68.64, 104.42),
            16: (22.05, 15.00, 21.20, 28.13, 37.06, 56.29, 99.33),
            64: (12.58, 8.77, 13.25, 19.76, 31.40, 56.07, 104.68),
            390: (7.77, 5.84, 10.42, 19.16, 35.94, 68.02, 128.79),
        },
    ),
    Row("DP-SGD", "DP-SGD", Identity(), (83.85, 21.82, 26.27, 31.68, 40.10, 59.17, 100.27)),
)


def known_slip(row: Row, column: Column) -> str | None:
    """Why a printed value is not to be met, or None."""
    if row.title == "BISR (p=16)" and column == Column(1.0, True):
        return "a misprint: 20.25 lies below the same row's 21.10 at ε=2, although the error grows as ε falls"
    if row.title == "BandInvMF (p=2)" and column.amplified:
        return "does not fit the row's own λ ≈ .977, which the value without amplification determines"
    return None
