"""What the loop around a private step must not do, each with what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lambdacgd import torch_private
from lambdacgd.training.distributed.compare import fingerprint
from lambdacgd.training.distributed.shards import local
from lambdacgd.training.errors import TrainingError


class Weights:
    """Whether anything but the run's own steps has changed the model's parameters.

    During a run torch's counters of in-place changes tell, which cost nothing to read. They do not see writes by way
    of ``p.data``. When the run ends, two numbers computed from all trained weights take their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._versions: list[int] | None = None  # None: the run has taken no step yet
        self._fingerprint: tuple[int, int] | None = None

    def settle(self) -> None:
        """The weights are what a step of the run, or loading its checkpoint, made them."""
        self._versions = self._read()

    def changed(self) -> bool:
        """Whether something wrote to a parameter since ``settle``."""
        return self._versions is not None and self._read() != self._versions

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """A block that changes the weights and leaves them as they were."""
        changed = self.changed()
        try:
            yield
        finally:
            if not changed and self._versions is not None:
                self.settle()

    def seal(self) -> None:
        """The run ends: from now on anybody may change the weights, by any means."""
        if self._versions is not None and self._fingerprint is None:
            self._fingerprint = fingerprint(local(p) for p in self._trained)
            self._versions = self._read()

    def check(self) -> None:
        """Raise unless the weights are those of the run's last step."""
        sealed = self._fingerprint
        if self.changed() or (sealed is not None and fingerprint(local(p) for p in self._trained) != sealed):
            raise TrainingError(
                "these weights are not those of the run's last step: something else has changed them since, and the "
                "run's (ε, δ) may not be theirs. Export before changing them. If the change used no private data, save "
                "the weights yourself and keep the card of that export with them"
            )

    def _read(self) -> list[int]:
        watched = self._frozen if self._fingerprint is not None else [*self._trained, *self._frozen]
        return [torch_private.version(local(p)) for p in watched]
