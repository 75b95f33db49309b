"""Strategies for `lightning.Trainer` that train with differential privacy from a plan, in one process or several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdacgd.clipping.probe import fingerprints
from lambdacgd.errors import InvalidInput
from lambdacgd.integrations import shared
from lambdacgd.integrations.shared import LogicalBatch
from lambdacgd.planning import Plan
from lambdacgd.training import CheckpointError, Private, TrainingError, privatize
from lambdacgd.training.checkpoint import read, save
from lambdacgd.training.distributed.world import World
from lambdacgd.training.step import check_is_plan

shared.need("lightning", "lightning")

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy  # noqa: E402
from lightning.pytorch.trainer import Trainer  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

__all__ = ["LambdaCGDDDPStrategy", "LambdaCGDStrategy", "read_checkpoint"]

# What the strategies replace or call of Lightning's own, with the parameters that they count on.
INTERNALS: shared.Internals = {
    Strategy: {
        "setup": "trainer", "teardown": "", "on_exception": "exception", "training_step": "args kwargs",
        "batch_to_device": "batch device dataloader_idx", "on_train_end": "", "backward": "closure_loss optimizer",
        "optimizer_step": "optimizer closure model", "restore_checkpoint_after_setup": None,
        "save_checkpoint": "checkpoint filepath storage_options", "load_checkpoint": "checkpoint_path weights_only",
        "load_model_state_dict": "checkpoint strict", "load_optimizer_state_dict": "checkpoint",
    },
    DDPStrategy: {"configure_ddp": ""},
    Precision: {"_after_closure": "model optimizer"},
    Trainer: {"_results": None},
}  # fmt: skip
shared.check_internals("lightning", "lightning", ((2, 6), (2, 6)), INTERNALS)

_Base: Any = object  # stands before a strategy of Lightning in the method resolution order
_SingleDevice: Any = SingleDeviceStrategy  # their hooks are annotated more loosely than they are called
_DDP: Any = DDPStrategy
_KEPT = ("state_dict", "optimizer_states")  # of Lightning's checkpoint: what the run's own state holds already


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint that a strategy of this module wrote, as Lightning knows it.

    For ``module.load_state_dict(read_checkpoint(path)["state_dict"])``, where ``load_from_checkpoint`` would expect a
    pickled file.

    Args:
        path: The checkpoint's folder.

    Returns:
        Lightning's dict, with ``state_dict`` and, unless only weights were saved, ``optimizer_states``.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    found = read(path)
    return _lightnings(found["extra"], found["model"], found["optimizer"])


def _lightnings(extra: dict[str, Any], weights: dict[str, Any], optimizer: dict[str, Any] | None) -> dict[str, Any]:
    """Lightning's checkpoint out of ours."""
    state = {extra["prefix"] + name: value for name, value in weights.items()} | extra["other_state"]
    return extra["lightning"] | {"state_dict": state} | ({} if optimizer is None else {"optimizer_states": [optimizer]})


class Privatising(_Base):
    """What both strategies do: one batch for Lightning is one logical batch, and every step is `privatize`'s."""

    def _take(
        self,
        plan: Plan,
        dataset: Any,
        *,
        max_grad_norm: float,
        key: shared.KeyLike,
        submodule: str = "",
        **options: Any,
    ) -> None:
        """``options`` go to `privatize`."""
        check_is_plan(plan)
        shared.check_key(key)
        self.plan, self.dataset = plan, dataset
        self.private: Private | None = None
        self.loader = shared.LogicalLoader(self, dataset)
        self._key, self._submodule, self._options = key, submodule, options | {"max_grad_norm": max_grad_norm}
        self._randomness = shared.TrainingRandomness()

    # --- the run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Bind the plan to the model, once it is on its device and has its optimizer."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        world = World.here()
        with world.together("starting to train"):
            check_trainer(trainer, self.plan)
            check_module(self.lightning_module, self.optimizers)
            if trainer.ckpt_path is None:
                shared.refuse_second_run(self.private, "fit(…, ckpt_path=…)")
            key = shared.load_or_make(self._key) if world.first else None  # other ranks receive it from rank 0
        self._randomness = shared.TrainingRandomness()
        model = self.lightning_module.get_submodule(self._submodule)
        self.private = privatize(model, self.optimizers[0], self.dataset, self.plan, key=key, **self._options)

    def teardown(self) -> None:
        if self.private is not None:
            self.private.detach()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        if self.private is not None:
            self.private.detach()
        super().on_exception(exception)

    # --- a logical step ----------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """A logical batch moves part by part."""
        return batch if isinstance(batch, LogicalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """``training_step`` of the module for every physical batch, with its backward pass for all but the last."""
        if not isinstance(batch, LogicalBatch) or self.private is None:
            raise TrainingError(f"{type(batch).__name__} is no logical batch of the plan: pass strategy.loader to fit")
        output, results = None, self.lightning_module.trainer._results
        with self._randomness.step():
            for part, last in batch.parts():
                moved = super().batch_to_device(self.precision_plugin.convert_input(part))
                if results is not None:  # Lightning weighs logged values by the size of the batch it knows of
                    results.batch, results.batch_size = moved, None
                output = super().training_step(moved, *args, **kwargs)
                if not last:
                    self.backward(_loss(output), None)
        self.lightning_module.log_dict(shared.logged_claim(self.private), on_step=True, on_epoch=False, batch_size=1)
        check_monitors(self.lightning_module.trainer)  # before this step changes a weight
        return output

    def on_train_end(self) -> None:
        """What the last epoch's end has logged, a stopping time may have followed."""
        super().on_train_end()
        check_monitors(self.lightning_module.trainer)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure's backward pass first, then a step without it: noise comes in between."""
        result = closure()
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        return result

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The ledger is asked before any weight is loaded, and it needs the run."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The run's checkpoint, a folder, with Lightning's own state in it. What is not plain data is refused."""
        if self.private is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        own = {self._prefix + name for name in self.private.model.state_dict()}
        extra = {
            "lightning": {name: value for name, value in checkpoint.items() if name not in _KEPT},
            "prefix": self._prefix,
            "other_state": {name: value for name, value in checkpoint["state_dict"].items() if name not in own},
        }
        self._randomness.put_back()
        save(self.private, filepath, extra, weights_only="optimizer_states" not in checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; ``fit`` goes on from it, so it must be the run's newest release."""
        if self.private is not None and self._fitting:
            extra = self.private.load(checkpoint_path)
            if "lightning" not in extra:
                raise CheckpointError(f"{checkpoint_path} was not saved by this strategy: go on with private.load")
            self._randomness.keep()
            return _lightnings(extra, self.private.model.state_dict(), self.private.optimizer.state_dict())
        if Path(checkpoint_path).is_dir():
            return read_checkpoint(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=True)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights of the run's checkpoint are in place already; what else the module holds comes now."""
        parameters = () if self.private is None else tuple(self.private.model.parameters())
        before = fingerprints(parameters)
        with self._may_load():
            super().load_model_state_dict(checkpoint, strict)
        if self._fitting and fingerprints(parameters) != before:
            raise TrainingError("on_load_checkpoint changed weights of the run: load others before fit, with earlier")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of a checkpoint that `load_checkpoint` has asked the ledger about."""
        with self._may_load():
            super().load_optimizer_state_dict(checkpoint)

    @property
    def _fitting(self) -> bool:
        """Whether the run is under way, or is being gone on with."""
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING and self.private is not None

    def _may_load(self) -> contextlib.AbstractContextManager[None]:
        return self.private.loading() if self.private is not None and self._fitting else contextlib.nullcontext()

    @property
    def _prefix(self) -> str:
        """What names of the whole module have before those of the private part."""
        return f"{self._submodule}." if self._submodule else ""


class LambdaCGDStrategy(Privatising, _SingleDevice):
    """Trains a ``LightningModule`` with the plan's (ε, δ) on one device.

    ```python
    strategy = LambdaCGDStrategy(plan, dataset, max_grad_norm=1.0, key="run.key", max_physical_batch_size=64)
    trainer = lightning.Trainer(strategy=strategy)
    trainer.fit(module, strategy.loader, val_dataloaders=…)
    ```

    One batch for Lightning is one logical batch: ``global_step``, schedulers, ``val_check_interval`` and checkpoints
    count logical steps, and the physical batches of ``max_physical_batch_size`` are read inside, each with one call of
    ``training_step``.

    Args:
        plan: From ``lc.plan``, for ``dataset``.
        dataset: The examples. Pass ``strategy.loader`` to ``fit``.
        device: By default CUDA where there is one.
        **settings: ``max_grad_norm``, the norm ζ that every example's gradient is clipped to; ``key``, a ``SecretKey``
            or the path of a key file, which is made where there is none; ``submodule``, the attribute that holds the
            model where ``training_step`` calls that (``self.net(x)``) instead of ``self(x)``; and whatever else
            ``lc.privatize`` takes. The loss must be the mean (``loss_reduction``) over the examples of the batch that
            ``training_step`` sees.

    Attributes:
        private: The run under way or last.
        loader: The plan's logical batches.

    Raises:
        InvalidInput: The plan is none, or the key is neither a key nor a path.

    Guarantee
    ---------
    Weights in checkpoints and after ``fit`` are (ε, δ)-DP as `Private` says. Every checkpoint that this strategy
    writes is entered in the ledger beside the key, and ``fit(ckpt_path=…)`` goes on from the newest only.
    """

    def __init__(self, plan: Plan, dataset: Any, *, device: str | torch.device | None = None, **settings: Any) -> None:
        super().__init__(device=torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu")))
        self._take(plan, dataset, **settings)


class LambdaCGDDDPStrategy(Privatising, _DDP):
    """As `LambdaCGDStrategy`, with a whole model in each of several processes.

    Batches are split between the processes, clipped sums reduced once a step, and every process adds the same noise.
    Rank 0 keeps the key; all need the same file system for checkpoints. The module is not wrapped in
    DistributedDataParallel, which would send gradients that were not clipped.

    Args:
        plan: As for `LambdaCGDStrategy`, as are ``dataset`` and ``settings``.
        process_group_backend: As for Lightning's ``DDPStrategy``, as is ``start_method``.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Any,
        *,
        process_group_backend: str | None = None,
        start_method: str = "popen",
        **settings: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, start_method=start_method)
        self._take(plan, dataset, **settings)

    def configure_ddp(self) -> None:
        """Nothing is wrapped: `privatize` reduces the sums."""


def _loss(output: Any) -> Tensor:
    with contextlib.suppress(TypeError, KeyError):
        found = output if isinstance(output, Tensor) else output["loss"]
        if isinstance(found, Tensor):
            return found
    raise TrainingError(f"training_step must return the loss or a dict with 'loss', not {type(output).__name__}")


# --- settings that cannot hold under a plan --------------------------------------------------------------------------

_DEFAULT_EPOCHS = (None, -1, 1000)  # what Lightning makes of a max_epochs that nobody gave


def check_trainer(trainer: Any, plan: Plan) -> None:
    """Refuse what would change gradients, batches or their number behind the plan's back; set what it fixes."""
    for name, allowed, advice in (("accumulate_grad_batches", 1, _ACCUMULATE), ("gradient_clip_val", None, _CLIP)):
        if (given := getattr(trainer, name)) != allowed:
            raise InvalidInput(name, given, advice)
    for kind, advice in _CALLBACKS:  # ``Tuner.lr_find`` and ``Tuner.scale_batch_size`` put one in place for a fit
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise InvalidInput("callbacks", f"Leave {kind.__name__} out: {advice}.")
    if type(trainer.strategy.checkpoint_io) is not TorchCheckpointIO:
        raise InvalidInput("plugins", "Each is written whole before the ledger knows it: leave CheckpointIO out.")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise InvalidInput("precision", trainer.precision, "GradScaler sees gradients without noise. Use 'bf16-mixed'")
    loop = trainer.fit_loop
    if trainer.max_steps not in (-1, plan.steps):
        raise InvalidInput("max_steps", trainer.max_steps, f"the plan has {plan.steps} steps. {_HORIZON}")
    if loop.max_epochs not in (*_DEFAULT_EPOCHS, plan.epochs):
        raise InvalidInput("max_epochs", loop.max_epochs, f"the plan has {plan.epochs} epochs. {_HORIZON}")
    loop.max_epochs = plan.epochs


def check_monitors(trainer: Any) -> None:
    """Refuse to steer by what training has logged: no noise protects it, so weights would depend on it unnoised."""
    names = {result.meta.name for result in trainer.fit_loop._results.values()}
    logged = names | {f"{name}_{when}" for name in names for when in ("step", "epoch")}
    watched = {getattr(callback, "monitor", None) for callback in trainer.callbacks}
    watched |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    for monitor in watched & logged:
        raise InvalidInput("monitor", f"A callback or scheduler monitors {monitor!r}, which {_STEERED}.")


def check_module(module: Any, optimizers: list[Any]) -> None:
    """Refuse modules that step by themselves, or with more than one optimizer."""
    if not module.automatic_optimization:
        raise InvalidInput("automatic_optimization", False, "the strategy steps by itself. Loop with lc.privatize")
    if len(optimizers) != 1:
        raise InvalidInput("configure_optimizers", f"It returned {len(optimizers)} optimizers: return one.")


_HORIZON = "Its noise is for all of them: leave this out or plan anew; to stop early use a callback"
_ACCUMULATE = "leave it at 1: the plan's logical batches are split by max_physical_batch_size of the strategy"
_SEARCH = "it trains on private data and goes back, so that noise serves twice. Choose on public data"
_STEERED = "training logged without noise. Fix schedules, or monitor what validation_step logs of public data"
_CLIP = "gradients are clipped per example, before the noise: give max_grad_norm to the strategy and leave this out"
_CALLBACKS: tuple[tuple[type, str], ...] = (
    (callbacks.LearningRateFinder, _SEARCH),
    (callbacks.BatchSizeFinder, "the physical batch size is max_physical_batch_size of the strategy. " + _SEARCH),
    (callbacks.GradientAccumulationScheduler, _ACCUMULATE),
)
