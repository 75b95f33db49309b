"""Adam whose second moment is freed of the noise's variance, for independent noise only.

Private gradients are g̃ = ḡ + x with noise x of known variance s² a coordinate, so Adam's second moment estimates E ḡ²
+ s². Where the noise is independent of everything before (DP-SGD, λ = 0), E ḡx = 0 and subtracting s² is unbiased.
Where it is correlated, ḡ was computed at weights that the noise now being cancelled had moved: E ḡx ≠ 0, and no
constant removes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdacgd.errors import InvalidInput, number
from lambdacgd.mechanisms import Horizon, Mechanism
from lambdacgd.planning import Plan


def _adds_independent_noise(mechanism: Mechanism, horizon: Horizon) -> bool:
    """Whether this is DP-SGD under another name: C = I."""
    noising = mechanism.noising(horizon.steps)
    return mechanism.column_scales(horizon.steps) is None and noising[0] == 1.0 and not noising[1:].any()


class DebiasedAdam(Optimizer):
    """Adam with the noise's variance s² = (σζ/B)² taken out of its second moment; decoupled weight decay.

    The difference v̂ − s² is kept above what the average's own fluctuation makes of pure noise,
    s²·√(2(1−β₂)/(1+β₂)): below that nothing is known about ḡ². Post-processing, so the plan's privacy is unchanged.
    """

    def __init__(
        self,
        params: Iterable[Any],
        plan: Plan,
        *,
        max_grad_norm: float,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not _adds_independent_noise(plan.mechanism, plan.block):
            raise InvalidInput(
                "plan",
                f"The noise of {plan.mechanism.name} is correlated, and subtracting its variance is unbiased for "
                "independent noise only. Use torch.optim.AdamW.",
            )
        number("lr", lr, above=0, include=(0,))
        for beta in betas:
            number("betas", beta, above=0, below=1, include=(0,))
        number("eps", eps, above=0)
        number("weight_decay", weight_decay, above=0, include=(0,))
        number("max_grad_norm", max_grad_norm, above=0, include=() if plan.sigma else (math.inf,))
        self.noise_variance = (plan.sigma * max_grad_norm / plan.batch_size) ** 2 if plan.sigma else 0.0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise InvalidInput("closure", "Gradients are used once: call step() without a closure.")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        square = state["exp_avg_sq"] / (1 - second ** state["step"])
        floor = self.noise_variance * math.sqrt(2 * (1 - second) / (1 + second))
        denominator = square.sub_(self.noise_variance).clamp_(min=floor).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(mean, denominator, value=-group["lr"])
