"""The noise field (ChaCha20 -> Gaussian) and the two ways to correlate it: regenerated and buffered."""

from lambdacgd.noise.field import BufferedNoise, NoiseError, NoiseField, NonFiniteSum, RegeneratedNoise
from lambdacgd.noise.layout import Layout, LayoutError

__all__ = ["BufferedNoise", "Layout", "LayoutError", "NoiseError", "NoiseField", "NonFiniteSum", "RegeneratedNoise"]
