"""The models of the step benchmark (kept in the package, so that ``lambdacgd bench step`` has them too)."""

from lambdacgd.clipping.benchmark_models import CASES, CNN, Bert, Case, LSTMClassifier, ViT, WideResNet

__all__ = ["CASES", "CNN", "Bert", "Case", "LSTMClassifier", "ViT", "WideResNet"]
