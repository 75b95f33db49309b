"""Settings of `lightning.Trainer` and of modules that cannot hold under a plan, each with what to do instead."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden

from lambdacgd.planning import Plan
from lambdacgd.validation import InvalidInput

_DEFAULT_EPOCHS = (None, -1, 1000)  # what Lightning makes of a max_epochs that nobody gave


def check_trainer(trainer: Any, plan: Plan) -> None:
    """Refuse what would change gradients, batches or their number behind the plan's back; set what it fixes."""
    _only(trainer, "accumulate_grad_batches", (1,), _ACCUMULATE)
    _only(trainer, "gradient_clip_val", (None,), _CLIP)
    _only(trainer, "limit_train_batches", (None, 1.0), _LIMIT)
    _only(trainer, "overfit_batches", (0, 0.0), _LIMIT)
    _only(trainer, "fast_dev_run", (False, 0), _LIMIT)
    _only(trainer, "reload_dataloaders_every_n_epochs", (0,), "the plan's loader stays the same for the whole run")
    _check_callbacks(trainer.callbacks)
    asked = len(getattr(trainer._accelerator_connector, "_parallel_devices", None) or [])
    if trainer.world_size == 1 < asked:  # no error: without devices=… Lightning asks for all that there are
        warnings.warn(f"of {asked} devices this strategy takes one: LambdaCGDDDPStrategy takes all", stacklevel=2)
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        raise InvalidInput("plugins", "AsyncCheckpointIO", "a checkpoint must be whole before the ledger knows it")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise InvalidInput(
            "precision", trainer.precision, "GradScaler looks at gradients before they are noised. Use 'bf16-mixed'"
        )
    loop = trainer.fit_loop
    if trainer.max_steps not in (-1, plan.steps):
        raise InvalidInput("max_steps", trainer.max_steps, f"the plan has {plan.steps} steps. {_HORIZON}")
    if loop.max_epochs not in (*_DEFAULT_EPOCHS, plan.epochs):
        raise InvalidInput("max_epochs", loop.max_epochs, f"the plan has {plan.epochs} epochs. {_HORIZON}")
    loop.max_epochs = plan.epochs


def _check_callbacks(callbacks: list[Any]) -> None:
    """Tuners are callbacks too: ``Tuner.lr_find`` and ``Tuner.scale_batch_size`` put one in place for a fit."""
    for kind, advice in (
        (LearningRateFinder, _SEARCH),
        (BatchSizeFinder, "the physical batch size is max_physical_batch_size of the strategy. " + _SEARCH),
        (GradientAccumulationScheduler, _ACCUMULATE),
    ):
        if any(isinstance(callback, kind) for callback in callbacks):
            raise InvalidInput("callbacks", kind.__name__, advice)


def check_monitors(trainer: Any) -> None:
    """Refuse to steer by what training has logged: no noise protects it, so weights would depend on it unnoised."""
    names = {result.meta.name for result in trainer.fit_loop._results.values()}
    logged = names | {f"{name}_{when}" for name in names for when in ("step", "epoch")}
    watched = [(getattr(callback, "monitor", None), type(callback).__name__) for callback in trainer.callbacks]
    watched += [(c.monitor, "ReduceLROnPlateau") for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
    for monitor, by in watched:
        if monitor in logged:
            raise InvalidInput("monitor", f"{monitor} ({by})", _STEERED)


def check_module(module: Any, optimizers: list[Any]) -> None:
    """Refuse modules whose hooks would step, clip or move batches by themselves."""
    if not module.automatic_optimization:
        raise InvalidInput(
            "automatic_optimization",
            False,
            "this strategy takes a step after every logical batch by itself. With manual optimization write the loop "
            "with lc.privatize",
        )
    if len(optimizers) != 1:
        raise InvalidInput(
            "configure_optimizers", f"{len(optimizers)} optimizers", "give one: an example's gradient has one norm"
        )
    for hook, advice in (
        ("configure_gradient_clipping", _CLIP),
        ("on_before_batch_transfer", "change batches in the dataset or in collate_fn"),
    ):
        if is_overridden(hook, module):
            raise InvalidInput(hook, "overridden", advice)


def _only(trainer: Any, name: str, allowed: tuple[Any, ...], advice: str) -> None:
    given = getattr(trainer, name, allowed[0])
    if not any(type(given) is type(value) and given == value for value in allowed):  # 1 is a batch, 1.0 is all of them
        raise InvalidInput(name, given, advice)


_HORIZON = "Its noise is for all of them: leave this out or plan anew; to stop early use a callback"
_ACCUMULATE = (
    "leave it at 1: logical batches come from the plan, and max_physical_batch_size of the strategy splits them"
)
_SEARCH = (
    "it trains on the private data, looks at the losses and goes back to the weights before, so that the run's noise "
    "serves twice. Choose on public data, or with a plan and a strategy for each trial, which add up"
)
_STEERED = (
    "training logged it, from private data and without noise: a learning rate, a stopping time or a choice of weights "
    "that follows it is not covered by the plan's (ε, δ). Use a schedule fixed beforehand, or monitor what "
    "validation_step logs of public data"
)
_CLIP = "gradients are clipped per example, before the noise: give max_grad_norm to the strategy and leave this out"
_LIMIT = "the plan fixes which examples come when. Leave it out; to debug, train with a plan for epsilon=inf"
