"""`LambdaCGDStrategy`: Lightning's automatic optimisation over logical batches, with `privatize` underneath."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lambdacgd.clipping import LossReduction, Mode
from lambdacgd.integrations.keyfile import KeyLike, check_key, load_or_make
from lambdacgd.integrations.lightning import checkpoints
from lambdacgd.integrations.lightning.settings import check_module, check_monitors, check_trainer
from lambdacgd.integrations.logical import LogicalBatch, LogicalLoader
from lambdacgd.integrations.randomness import TrainingRandomness
from lambdacgd.planning import Plan
from lambdacgd.training import Private, TrainingError, privatize
from lambdacgd.training.distributed.world import World
from lambdacgd.training.trained import remember
from lambdacgd.validation import InvalidInput

_Base: Any = object  # stands before a strategy of Lightning in the method resolution order
_SingleDevice: Any = SingleDeviceStrategy  # their hooks are annotated more loosely than they are called
_DDP: Any = DDPStrategy


class Privatising(_Base):
    """What both strategies do: one batch for Lightning is one logical batch, and every step is `privatize`'s."""

    def _take(
        self,
        plan: Plan,
        dataset: Any,
        *,
        max_grad_norm: float,
        key: KeyLike,
        max_physical_batch_size: int | None = None,
        submodule: str | None = None,
        loss_reduction: LossReduction = "mean",
        clipping_mode: Mode = "flat",
        **options: Any,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInput("plan", type(plan).__name__, "it must be a Plan: lc.plan(…) makes one")
        check_key(key)
        self.plan, self.dataset = plan, dataset
        self.private: Private | None = None
        self.loader = StrategyLoader(self)
        self._key, self._submodule = key, submodule
        self._options = options | {
            "max_grad_norm": max_grad_norm,
            "max_physical_batch_size": max_physical_batch_size,
            "loss_reduction": loss_reduction,
            "clipping_mode": clipping_mode,
        }
        self._randomness = TrainingRandomness()

    # --- the run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Bind the plan to the model, once it is on its device and has its optimizer."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        world = World.of(None)
        with world.together("starting to train"):
            self._check(trainer)
            key = load_or_make(self._key) if world.first else None  # other ranks receive it from rank 0
        self._randomness = TrainingRandomness()
        self.private = privatize(
            self._private_model(), self.optimizers[0], self.dataset, self.plan, key=key, **self._options
        )
        remember(self.lightning_module, self.private.trained)  # for lc.export of the whole module

    def _check(self, trainer: Any) -> None:
        check_trainer(trainer, self.plan)
        check_module(self.lightning_module, self.optimizers)
        if self.private is not None and self.private.steps_taken and trainer.ckpt_path is None:
            raise TrainingError(
                f"this strategy's run has taken {self.private.steps_taken} of {self.plan.steps} steps. Go on with "
                "fit(…, ckpt_path=…), or make a new module and strategy for a new run, which costs its own (ε, δ)"
            )

    def _private_model(self) -> nn.Module:
        module: nn.Module = self.lightning_module
        if self._submodule is None:
            return module
        try:
            return module.get_submodule(self._submodule)
        except AttributeError as error:
            raise InvalidInput("submodule", self._submodule, f"the module has no such part ({error})") from None

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
            raise TrainingError(
                f"training got a {type(batch).__name__} from a loader that is not the plan's. Pass strategy.loader to "
                "fit, or return it from train_dataloader()"
            )
        output = None
        with self._randomness.step():
            for part, last in batch.parts():
                moved = super().batch_to_device(self.precision_plugin.convert_input(part))
                self._show_batch(moved)
                output = super().training_step(moved, *args, **kwargs)
                if not last:
                    self.backward(_loss(output), None)
        self._log_privacy()
        check_monitors(self.lightning_module.trainer)  # before this step changes a weight
        return output

    def on_train_end(self) -> None:
        """What the last epoch's end has logged, a stopping time may have followed."""
        super().on_train_end()
        check_monitors(self.lightning_module.trainer)

    def _show_batch(self, part: Any) -> None:
        """Lightning weighs logged values by the size of the batch it knows of."""
        results = self.lightning_module.trainer._results
        if results is not None:
            results.batch, results.batch_size = part, None

    def _log_privacy(self) -> None:
        spent = {"privacy_epsilon": self.plan.epsilon, "privacy_delta": self.plan.delta}
        self.lightning_module.log_dict(spent, on_step=True, on_epoch=False, batch_size=1)

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
        """Lightning's checkpoint with the run's identity, entered in the ledger, whole or not at all."""
        if self.private is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with checkpoints.released(self.private, self._randomness, checkpoint, Path(filepath)) as draft:
            super().save_checkpoint(checkpoint, draft, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; for ``fit`` it must be the run's newest release."""
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        private = self.private if fitting else None
        if private is not None:
            private.world.from_first("loading", lambda: checkpoints.settle(private, Path(checkpoint_path)))
        world = World(None) if private is None else private.world
        with world.together("loading"):
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if private is not None:
            checkpoints.resume(private, self._randomness, found, os.fspath(checkpoint_path))
        return found

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Of a checkpoint that `load_checkpoint` has asked the ledger about."""
        with contextlib.nullcontext() if self.private is None else self.private.loading():
            super().load_optimizer_state_dict(checkpoint)


class LambdaCGDStrategy(Privatising, _SingleDevice):
    """Trains a ``LightningModule`` with the plan's (ε, δ) on one device.

    ::

        strategy = LambdaCGDStrategy(plan, dataset, max_grad_norm=1.0, key="run.key", max_physical_batch_size=64)
        trainer = lightning.Trainer(strategy=strategy)
        trainer.fit(module, strategy.loader, val_dataloaders=…)

    One batch for Lightning is one logical batch: ``global_step``, schedulers, ``val_check_interval`` and checkpoints
    count logical steps, and the physical batches of ``max_physical_batch_size`` are read inside, each with one call of
    ``training_step``. Its loss must be the mean (``loss_reduction``) over the examples of the batch it sees. ``key``
    is a ``SecretKey`` or the path of a key file, which is made where there is none. ``submodule`` names the attribute
    that holds the model where ``training_step`` calls that (``self.net(x)``) instead of ``self(x)``. The rest goes to
    ``privatize``. ``device`` is CUDA where there is one. ``private`` is the run under way or last.

    Guarantee
    ---------
    Weights in checkpoints and after ``fit`` are (ε, δ)-DP as `Private` says. Every checkpoint that this strategy
    writes is entered in the ledger beside the key, and ``fit(ckpt_path=…)`` goes on from the newest only.
    """

    def __init__(self, plan: Plan, dataset: Any, *, device: str | torch.device | None = None, **settings: Any) -> None:
        super().__init__(device=torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu")))
        self._take(plan, dataset, **settings)

    def setup_environment(self) -> None:
        kind = type(self.accelerator).__name__
        if (kind == "CPUAccelerator") != (self.root_device.type == "cpu"):
            raise InvalidInput(
                "device",
                str(self.root_device),
                f"the Trainer has a {kind}: give the strategy device=…, or the Trainer the accelerator that fits",
            )
        super().setup_environment()


class LambdaCGDDDPStrategy(Privatising, _DDP):
    """As `LambdaCGDStrategy`, with a whole model in each of several processes.

    Batches are split between the processes, clipped sums reduced once a step, and every process adds the same noise.
    Rank 0 keeps the key; all need the same file system for checkpoints. The module is not wrapped in
    DistributedDataParallel, which would send gradients that were not clipped. ``process_group_backend`` and
    ``start_method`` are those of Lightning's ``DDPStrategy``.
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


class StrategyLoader:
    """What ``fit`` takes as its training loader: the plan's logical batches, once the run has begun."""

    def __init__(self, strategy: Privatising) -> None:
        self._strategy, self.dataset = strategy, strategy.dataset

    def __len__(self) -> int:
        """Logical steps in an epoch."""
        return self._strategy.plan.steps_per_epoch

    def __iter__(self) -> Iterator[LogicalBatch]:
        private = self._strategy.private
        if private is None:
            raise TrainingError("the plan's batches exist once trainer.fit has bound the plan to the module")
        yield from LogicalLoader(private)


def _loss(output: Any) -> Tensor:
    with contextlib.suppress(TypeError, KeyError):
        found = output if isinstance(output, Tensor) else output["loss"]
        if isinstance(found, Tensor):
            return found
    raise TrainingError(
        f"training_step returned {type(output).__name__}; it must return the loss or a dict with 'loss' for every "
        "physical batch: each example takes part in its logical step"
    )
