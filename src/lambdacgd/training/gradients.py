"""What stands in ``p.grad``, and what must not: only clipped and noised gradients may move a weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd.training.distributed.shards import gradient_like, local
from lambdacgd.training.errors import TrainingError


class Gradients:
    """The gradients of the clipped parameters: None until a step is noised, ours until ``zero_grad()``."""

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clipped = {id(p) for p in parameters.values()}
        self._written: dict[str, tuple[Tensor, int]] = {}

    def check_parameters(self) -> None:
        """The optimizer still holds what it was privatized with, and nothing else that trains."""
        seen = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._clipped:
                    seen += 1
                elif p.requires_grad or p.grad is not None:
                    raise TrainingError(
                        f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not clipped: "
                        "it was added or unfrozen after privatize. The layout is fixed for a run: detach, change the "
                        "model, privatize anew"
                    )
        if seen != len(self._clipped):
            raise TrainingError(
                f"the optimizer now holds {seen} of the {len(self._clipped)} parameters it was privatized with; they "
                "are fixed for a run"
            )

    def check_clear(self, done: int) -> None:
        """Nothing is left in ``p.grad`` from step ``done`` or from somebody else."""
        for name, p in self._parameters.items():
            if p.grad is None:
                continue
            tensor, version = self._written.get(name, (None, 0))
            # Several DTensors zeroed at once (foreach) count no change: then only their values tell.
            if p.grad is tensor and p.grad._version == version and bool(local(p.grad).any()):
                self.clear()
                raise TrainingError(
                    f"{name}.grad still holds the gradient of step {done}: call optimizer.zero_grad() after every step"
                )
            if p.grad is not tensor and bool(local(p.grad).any()):
                raise TrainingError(
                    f"{name}.grad was written by something other than this library; it would be lost, and it is not "
                    "private. Leave p.grad alone: clipped sums are kept elsewhere until optimizer.step()"
                )
            p.grad = None  # zero_grad(set_to_none=False): a zero gradient would still decay weights and move momentum
        self._written = {}

    def drop_zeroed(self) -> None:
        """After zero_grad(set_to_none=False) a gradient is None too: the clipper is about to write its memory."""
        for name, p in self._parameters.items():
            tensor, version = self._written.get(name, (None, 0))
            if tensor is not None and p.grad is tensor and p.grad._version != version:
                p.grad = None
            if p.grad is None:
                self._written.pop(name, None)

    def part(self) -> None:
        """The sums' memory is about to be written: a gradient still there becomes a copy, so that nobody changes sums
        by way of ``p.grad``.
        """
        self.drop_zeroed()
        for name, (tensor, _) in list(self._written.items()):
            p = self._parameters[name]
            if p.grad is tensor:
                p.grad = tensor.clone()
                self._written[name] = (p.grad, p.grad._version)

    def write(self, noisy: dict[str, Tensor]) -> None:
        """Put noisy means into ``p.grad``, rounded once to the parameter's dtype."""
        for name, p in self._parameters.items():
            # The clipper's own buffer, through an alias that counts its own changes: the next backward pass writes the
            # buffer again, and only zero_grad writes the alias.
            p.grad = gradient_like(p, noisy[name].data)
            self._written[name] = (p.grad, p.grad._version)

    def clear(self) -> None:
        for p in self._parameters.values():
            p.grad = None
        self._written = {}
