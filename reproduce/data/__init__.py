"""Data sets that ``lambdacgd train`` knows: digits (no download), CIFAR-10 and IMDb (from a folder or a library)."""

from reproduce.data.base import Examples, Splits

__all__ = ["Examples", "Splits"]
