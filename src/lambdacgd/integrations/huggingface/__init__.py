"""`LambdaCGDTrainer`: a `transformers.Trainer` that trains with differential privacy from a plan."""

from lambdacgd.integrations.shared import need

need("hf", "transformers", "accelerate")

from lambdacgd.integrations.huggingface.trainer import LambdaCGDTrainer  # noqa: E402

__all__ = ["LambdaCGDTrainer"]
