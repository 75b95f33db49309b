"""Per-example clipped gradient sums in one backward pass. Other rooms of the package import from here."""

from lambdacgd.clipping.backward import LossReduction, Record, Stored, Totals, outer
from lambdacgd.clipping.bounds import SMALLEST_CLIP, Mode, accumulator
from lambdacgd.clipping.check import Report, check_model, register
from lambdacgd.clipping.clipper import Clipper, Replaced, attach, batch_size, compute_device
from lambdacgd.clipping.convert import convert
from lambdacgd.clipping.rules import Layer, tap
from lambdacgd.errors import ClippingError

__all__ = [
    "SMALLEST_CLIP", "Clipper", "ClippingError", "Layer", "LossReduction", "Mode", "Record", "Replaced", "Report",
    "Stored", "Totals", "accumulator", "attach", "batch_size", "check_model", "compute_device", "convert", "outer",
    "register", "tap",
]  # fmt: skip
