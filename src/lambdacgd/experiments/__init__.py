"""The paper's tables and figures, regenerated, and what goes beyond them; see ``framework`` for how one is written.

``EXPERIMENTS`` names them without importing anything heavy: name -> ("module:attribute", what it shows).
"""

EXPERIMENTS: dict[str, tuple[str, str]] = {
    "rmse-table": (
        "lambdacgd.experiments.rmse_table:EXPERIMENT",
        "the paper's RMSE table, every mechanism and ε, beside ours",
    ),
    "runtime-cifar": (
        "lambdacgd.experiments.runtime:CIFAR",
        "the paper's runtime table for CIFAR-10: seconds an epoch and memory, by how the noise is made",
    ),
    "runtime-imdb": (
        "lambdacgd.experiments.runtime:IMDB",
        "the paper's runtime table for IMDb: seconds an epoch and memory, by how the noise is made",
    ),
}
