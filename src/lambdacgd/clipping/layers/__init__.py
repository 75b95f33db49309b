"""Rules, one file a layer family; importing this package registers them."""

from lambdacgd.clipping.layers import conv, embedding, linear, norm

__all__ = ["conv", "embedding", "linear", "norm"]
