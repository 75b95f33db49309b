"""The old place of ``lambdacgd.errors``; goes once nothing imports it."""

from lambdacgd.errors import InvalidInput, integer, number

__all__ = ["InvalidInput", "integer", "number"]
