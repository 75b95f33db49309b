"""The paper's tables and figures, regenerated, and what goes beyond them; see ``framework`` for how one is written.

``EXPERIMENTS`` names them without importing anything heavy: name -> ("module:attribute", what it shows).
"""

EXPERIMENTS: dict[str, tuple[str, str]] = {
    "rmse-table": (
        "lambdacgd.experiments.rmse_table:EXPERIMENT",
        "the paper's RMSE table, every mechanism and ε, beside ours",
    ),
}
