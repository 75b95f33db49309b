"""What all samplings share: public parameters, a horizon, and batches that are a function of a secret key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import Horizon

Indices = NDArray[np.int64]

DEFAULT_RUN = "0"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Who takes part when. The fields are public; the key is an argument, never a field.

    A sampling that ``lc.plan`` is asked for says only of which kind it is; the plan *binds* it to the data set and the
    horizon. Every training run has its own ``run`` id (or its own key): two runs that shared their batches would not
    compose as independent mechanisms.

    Args:
        examples: N, the number of training examples; 0 as long as the sampling is not bound.
        steps_per_epoch: b; 0 as long as the sampling is not bound.
        epochs: k; 0 as long as the sampling is not bound.

    Raises:
        InvalidInput: a number cannot be used, or some of the three are given and others are not.
    """

    examples: int = 0
    steps_per_epoch: int = 0
    epochs: int = 0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.bound:
            return
        for field in ("examples", "steps_per_epoch", "epochs"):
            object.__setattr__(self, field, integer(field, getattr(self, field)))

    @property
    def bound(self) -> bool:
        """Whether the sampling knows its data set and its horizon."""
        return (self.examples, self.steps_per_epoch, self.epochs) != (0, 0, 0)

    def bind(self, *, examples: int, steps_per_epoch: int, epochs: int, batch_size: int | None = None) -> Self:
        """Bind the sampling to a data set and a horizon.

        Args:
            examples: N, the number of training examples.
            steps_per_epoch: b, the steps of an epoch.
            epochs: k, the number of epochs.
            batch_size: the batch size asked for. Only ``Cyclic`` draws batches of a fixed size; the others draw N/b
                examples on average and ignore it.

        Returns:
            The bound sampling; this one itself, if it was bound to the same numbers already.

        Raises:
            InvalidInput: a number cannot be used, or the sampling is bound to others.
        """
        return self._bound_to(examples=examples, steps_per_epoch=steps_per_epoch, epochs=epochs)

    def _bound_to(self, **numbers: int) -> Self:
        for name, value in numbers.items():
            own = getattr(self, name)
            if own and own != value:
                raise InvalidInput(
                    "sampling",
                    f"The sampling is made for {name} = {own} and the plan has {value}: leave it out of one.",
                )
        return replace(self, **numbers)

    @property
    def horizon(self) -> Horizon:
        """k epochs of b steps."""
        self._check_bound()
        return Horizon(self.steps_per_epoch, self.epochs)

    @property
    def steps(self) -> int:
        """n = k·b."""
        return self.horizon.steps

    @property
    def batch_size(self) -> float:
        """How many examples a step draws on average: N/b. What sums are divided by."""
        self._check_bound()
        return self.examples / self.steps_per_epoch

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
        """Draw the batches of a run.

        Args:
            key: the secret key that the draws are a function of.
            run: the run's id.
            start_step: the first step to draw for, 1 … n; n + 1 yields nothing.

        Returns:
            An iterator over the example indices of steps ``start_step`` … n, one array per step. The array is empty
            where nobody takes part.

        Raises:
            InvalidInput: the sampling is not bound, or the step is beyond the horizon.
        """
        integer(
            "start_step", start_step, maximum=self.steps + 1, why=": the horizon is fixed, and n + 1 yields nothing"
        )
        return self._batches(key, run, start_step)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        raise NotImplementedError

    def _check_bound(self) -> None:
        if not self.bound:
            raise InvalidInput(
                "sampling",
                f"This {self.name} sampling has no data set and no horizon yet: lc.plan(…, sampling=…) binds it, and "
                "so does sampling.bind(examples=…, steps_per_epoch=…, epochs=…).",
            )

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields: public numbers, as plan files hold them."""
        return {"name": self.name} | asdict(self)

    @classmethod
    def from_fields(cls, data: dict[str, Any]) -> Self:
        """Make a bound sampling of this class.

        Args:
            data: the fields of ``to_dict``, without the name.

        Raises:
            InvalidInput: a field is unknown, or the numbers that bind the sampling are missing.
        """
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise InvalidInput(
                "sampling",
                f"{cls.name} sampling knows {', '.join(sorted(known))}, and {', '.join(sorted(unknown))} was given.",
            )
        sampling = cls(**data)
        sampling._check_bound()
        return sampling
