"""Per-example clipped gradient sums in one backward pass."""

from lambdacgd.clipping.check import Report, check_model
from lambdacgd.clipping.clipper import Clipper, attach
from lambdacgd.clipping.convert import convert
from lambdacgd.clipping.rules import register
from lambdacgd.errors import ClippingError

__all__ = ["Clipper", "ClippingError", "Report", "attach", "check_model", "convert", "register"]
