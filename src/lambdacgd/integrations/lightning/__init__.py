"""Strategies for `lightning.Trainer` that train with differential privacy from a plan, in one process or several."""

from lambdacgd.integrations.extras import need

need("lightning", "lightning")

from lambdacgd.integrations.lightning.strategy import LambdaCGDDDPStrategy, LambdaCGDStrategy  # noqa: E402

__all__ = ["LambdaCGDDDPStrategy", "LambdaCGDStrategy"]
