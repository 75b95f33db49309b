"""The old place of ``lambdacgd.errors.ClippingError``; goes once nothing imports it."""

from lambdacgd.errors import ClippingError

__all__ = ["ClippingError"]
