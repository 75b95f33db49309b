"""What all samplings share: public parameters, a horizon, and batches that are a function of a secret key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import Horizon
from lambdacgd.validation import InvalidInput, integer

Indices = NDArray[np.int64]

DEFAULT_RUN = "0"


@dataclass(frozen=True)
class Sampling:
    """Who takes part when. The fields are public; the key is an argument, never a field.

    ``examples`` is N, ``steps_per_epoch`` b and ``epochs`` k. Every training run has its own ``run`` id (or its own
    key): two runs that shared their batches would not compose as independent mechanisms.
    """

    examples: int
    steps_per_epoch: int
    epochs: int
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in ("examples", "steps_per_epoch", "epochs"):
            object.__setattr__(self, field, integer(field, getattr(self, field)))

    @property
    def horizon(self) -> Horizon:
        """k epochs of b steps."""
        return Horizon(self.steps_per_epoch, self.epochs)

    @property
    def steps(self) -> int:
        """n = k·b."""
        return self.steps_per_epoch * self.epochs

    @property
    def kind(self) -> str:
        """What a certificate must have been made for: the name, and how often examples are dealt out."""
        return self.name

    @property
    def restart_every(self) -> int | None:
        """After how many steps the noise forgets its past, because the accounting composes such stretches; or never."""
        return None

    @property
    def block(self) -> Horizon:
        """The stretch over which noise is correlated: what a mechanism is resolved for. The whole run, or an epoch."""
        return self.horizon if self.restart_every is None else Horizon(self.restart_every, 1)

    def batches(self, key: SecretKey, *, run: str = DEFAULT_RUN, start_step: int = 1) -> Iterator[Indices]:
        """The example indices of steps ``start_step`` … n, one array a step (an empty one where nobody takes part)."""
        integer(
            "start_step", start_step, maximum=self.steps + 1, why=": the horizon is fixed, and n + 1 yields nothing"
        )
        return self._batches(key, run, start_step)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields: public numbers, as plan files hold them."""
        return {"name": self.name} | asdict(self)

    @classmethod
    def from_fields(cls, data: dict[str, Any]) -> Self:
        """A sampling of this class from the fields of ``to_dict``; unknown ones are refused."""
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise InvalidInput("sampling", ", ".join(sorted(unknown)), f"{cls.name} takes {sorted(known)}")
        return cls(**data)
