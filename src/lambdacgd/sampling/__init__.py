"""Who takes part when: Balls-in-Bins, Poisson and cyclic sampling as pure functions of a secret key. No torch."""

from lambdacgd.sampling.samplings import (
    BINS,
    DEFAULT_RUN,
    SAMPLINGS,
    BallsInBins,
    Bins,
    Cyclic,
    Poisson,
    Sampling,
    sampling_from_dict,
)

__all__ = [
    "BINS", "DEFAULT_RUN", "SAMPLINGS", "BallsInBins", "Bins", "Cyclic", "Poisson", "Sampling", "sampling_from_dict",
]  # fmt: skip
