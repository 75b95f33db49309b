"""What the Trainer refuses, or says that it does not cover: arguments, data, plans, callbacks."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import lambdacgd as lc
from lambdacgd.errors import InvalidInput
from lambdacgd.integrations.huggingface import LambdaCGDTrainer
from tests.integrations import hf

REFUSED = {
    "gradient_accumulation_steps": 2,
    "fp16": True,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length",
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "enable_jit_checkpoint": True,
    "ddp_static_graph": True,
    "parallelism_config": "some",
    "include_num_input_tokens_seen": "all",
    "max_steps": 3,
    "num_train_epochs": 7,
    "optim": "lomo",
    "max_grad_norm": 0.0,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_hold_are_refused_with_advice(name, tmp_path):
    args = hf.arguments(tmp_path)
    setattr(args, name, REFUSED[name])
    args.gradient_checkpointing = name == "gradient_checkpointing_kwargs"
    with pytest.raises(InvalidInput, match=name) as caught:
        LambdaCGDTrainer(hf.make_model("bert"), args, plan=hf.make_plan(), train_dataset=hf.Sentences(True))
    assert len(str(caught.value)) > 60


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(InvalidInput, match="torchrun"):
        hf.make_trainer("bert", tmp_path / "out")


def test_what_the_plan_fixes_is_set_and_the_callers_arguments_stay(tmp_path):
    args = hf.arguments(tmp_path, num_train_epochs=hf.EPOCHS)
    trainer = LambdaCGDTrainer(
        hf.make_model("bert"), args, plan=hf.make_plan(epochs=hf.EPOCHS), train_dataset=hf.Sentences(True)
    )
    assert trainer.args is not args
    assert trainer.args.num_train_epochs == hf.EPOCHS
    assert not args.ignore_data_skip
    exact = hf.arguments(tmp_path, max_steps=trainer.plan.steps)
    LambdaCGDTrainer(hf.make_model("bert"), exact, plan=trainer.plan, train_dataset=hf.Sentences(True))


def test_three_epochs_look_like_the_default_and_are_not_ignored_in_silence(tmp_path):
    data = hf.Sentences(True)
    with pytest.warns(UserWarning, match=r"the plan has 1 epochs.*num_train_epochs = 3.*is not used"):
        LambdaCGDTrainer(
            hf.make_model("bert"),
            hf.arguments(tmp_path, num_train_epochs=3),
            plan=hf.make_plan(epochs=1),
            train_dataset=data,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", category=lc.NotPrivateWarning)
        LambdaCGDTrainer(
            hf.make_model("bert"),
            hf.arguments(tmp_path, num_train_epochs=1),
            plan=hf.make_plan(epochs=1),
            train_dataset=data,
        )


def test_wrong_data_models_and_plans_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="plan is for 24"):
        hf.make_trainer("bert", tmp_path / "a", train_dataset=hf.Sentences(True, 23)).train()
    with pytest.raises(InvalidInput, match="Plan"):
        hf.make_trainer("bert", tmp_path / "b", plan={"epsilon": 1})
    with pytest.raises(InvalidInput, match="compute_loss_func"):
        hf.make_trainer("bert", tmp_path / "c", model=torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="each at its own"):
        LambdaCGDTrainer(args=hf.arguments(tmp_path), plan=hf.make_plan(), model_init=lambda: hf.make_model("bert"))


@pytest.mark.parametrize(
    ("moment", "act", "says"),
    [
        ("on_step_end", lambda m, o: o.step(), "without a new batch"),
        ("on_step_begin", lambda m, o: o.step(), "no batch was taken"),
        ("on_optimizer_step", lambda m, o: o.step(), "without a new batch"),
        ("on_pre_optimizer_step", hf.backward, "backward"),
        ("on_pre_optimizer_step", lambda m, o: [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()],
         "was written by something other"),
    ],
)  # fmt: skip
def test_callbacks_that_step_are_refused(moment, act, says, tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", callbacks=[hf.Meddler(moment, act)])
    with pytest.raises(lc.TrainingError, match=says):
        trainer.train()


def test_the_best_checkpoint_by_other_data_is_kept(tmp_path):
    trainer = hf.make_trainer(
        "bert", tmp_path / "out", eval_dataset=hf.Sentences(True, 8, seed=5), load_best_model_at_end=True,
        eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2, save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    best = json.loads(
        (tmp_path / "out" / f"checkpoint-{trainer.state.best_global_step}" / "trainer_state.json").read_text()
    )
    assert best["global_step"] == trainer.state.best_global_step


def test_learning_rates_that_follow_the_training_data_are_refused(tmp_path):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
    hf.make_trainer("bert", tmp_path / "out", eval_dataset=hf.Sentences(True, 8, seed=5), **plateau).train()
    data = hf.Sentences(True)
    trainer = hf.make_trainer("bert", tmp_path / "own", train_dataset=data, eval_dataset=data, **plateau)
    with pytest.raises(InvalidInput, match="public data"):
        trainer.train()
    assert trainer.private is None


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({}, {"num_train_epochs": 5}),
        ({}, {"max_steps": 3}),
    ],
)
def test_arguments_changed_behind_the_check_are_refused_too(given, changed, tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", **given)
    for name, value in changed.items():
        setattr(trainer.args, name, value)
    with pytest.raises(InvalidInput, match=r"gradient_accumulation_steps|num_train_epochs|max_steps"):
        trainer.train()
    assert trainer.private is None
