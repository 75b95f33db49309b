"""`LambdaCGDStrategy`: a strategy for `lightning.Trainer` that trains with differential privacy from a plan."""

from lambdacgd.integrations.extras import need

need("lightning", "lightning")

from lambdacgd.integrations.lightning.strategy import LambdaCGDStrategy  # noqa: E402

__all__ = ["LambdaCGDStrategy"]
