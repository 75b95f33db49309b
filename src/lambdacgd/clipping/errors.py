"""The one error of this package: what cannot be clipped exactly is refused, with the fix named."""


class ClippingError(ValueError):
    """The model, the loss or the call cannot be clipped per example exactly; the message says what to do."""
