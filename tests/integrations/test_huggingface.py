"""The Trainer trains what the loop by hand trains, under the Trainer's own arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import Trainer, TrainerCallback

import lambdacgd as lc
from lambdacgd.clipping import check_model
from lambdacgd.errors import InvalidInput
from lambdacgd.training import NotPrivateWarning
from tests.integrations import hf
from tests.training import oracle

KINDS = ["bert", "gpt2", "llama"]
KEY = bytes(range(32))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_equals_the_loop_by_hand(kind, lora, tmp_path):
    """Same key, run and initial weights; other physical batches; a loss written out example by example."""
    key = lc.SecretKey.from_bytes(KEY)
    model = hf.make_model(kind, lora=lora, layers=2)
    trainer = hf.make_trainer(kind, tmp_path / "out", model=model, key=key)
    start = hf.weights(trainer.model)
    hf.fix_id(trainer, "one")
    result = trainer.train()
    assert result.global_step == trainer.plan.steps == trainer.private.steps_taken
    twin = hf.make_model(kind, lora=lora, layers=2)
    hf.assert_same(start, hf.weights(twin))
    hf.train_by_hand(twin, kind, trainer.plan, key, "one")
    hf.assert_same(hf.weights(trainer.model), hf.weights(twin), tolerance=2e-5)
    moved = [name for name, value in hf.weights(trainer.model).items() if not torch.equal(value, start[name])]
    assert moved
    assert not lora or all("lora_" in name or "classifier" in name for name in moved)


ADAPTERS = {
    "prompt tuning": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "IA3": lambda peft: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoRA and a head": lambda peft: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_of_other_adapters_are_exact(name):
    """Against one example at a time, by autograd."""
    import peft

    model = peft.get_peft_model(hf.make_model("llama", layers=2), ADAPTERS[name](peft))
    data = hf.Sentences(False)

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits, labels = logits[:, -batch["labels"].shape[1] :][:, :-1], batch["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1)).mean()

    report = check_model(model, hf.collate([data[i] for i in range(4)]), loss=loss, tolerance=1e-5)
    assert report.examples == 4


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_without_noise_and_clipping_it_is_the_plain_trainer(kind, tmp_path):
    """ε = inf, every example in every batch, examples of one length: then the Trainer's token mean is ours."""
    data = hf.Sentences(kind == "bert")
    data._ids = [torch.arange(6) % (i + 2) + 1 for i in range(len(data))]
    plan = lc.plan(
        len(data),
        len(data),
        epochs=4,
        epsilon=float("inf"),
        delta=1e-4,
        mechanism=lc.LambdaCGD(0.5),
        sampling=lc.Cyclic(),
    )
    common = {"optim": "sgd", "learning_rate": 0.3, "warmup_steps": 1}
    ours = hf.make_trainer(kind, tmp_path / "ours", plan=plan, train_dataset=data, **common)
    with pytest.warns(NotPrivateWarning):
        ours.train()
    args = hf.arguments(tmp_path / "plain", per_device_train_batch_size=len(data), num_train_epochs=4, max_grad_norm=0,
                        **common)  # fmt: skip
    plain = Trainer(hf.make_model(kind), args, train_dataset=data, data_collator=hf.collate)
    plain.train()
    hf.assert_same(hf.weights(ours.model), hf.weights(plain.model), tolerance=1e-5)
    mine = [entry["loss_not_private"] for entry in ours.state.log_history if "loss_not_private" in entry]
    theirs = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_counters_logs_and_schedule_count_logical_steps(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", per_device_train_batch_size=1)
    trainer.train()
    plan, history = trainer.plan, trainer.state.log_history
    steps = [entry for entry in history if "loss_not_private" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, plan.steps + 1))
    assert [entry["epoch"] for entry in steps] == [s / plan.steps_per_epoch for s in range(1, plan.steps + 1)]
    rates = [entry["learning_rate"] for entry in steps]
    assert rates == pytest.approx([0.05 * (plan.steps - s) / plan.steps for s in range(plan.steps)])
    assert all(entry["privacy_epsilon"] == plan.epsilon and entry["privacy_delta"] == plan.delta for entry in steps)
    assert not any("loss" in entry or "train_loss" in entry or "grad_norm" in entry for entry in history)
    assert trainer.private.spent().epsilon == plan.epsilon


def test_evaluation_and_prediction_leave_training_alone(tmp_path):
    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    key = lc.SecretKey.from_bytes(KEY)
    ends = []
    for name, changes in {
        "plain": {},
        "eval": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    }.items():
        trainer = hf.make_trainer(
            "bert", tmp_path / name, key=key, eval_dataset=hf.Sentences(True, 10, seed=9), compute_metrics=accuracy,
            **changes,
        )  # fmt: skip
        hf.fix_id(trainer, "one")
        trainer.train()
        ends.append(hf.weights(trainer.model))
    hf.assert_same(*ends)
    assert sum("eval_accuracy" in entry for entry in trainer.state.log_history) == trainer.plan.steps + 1
    found = trainer.predict(hf.Sentences(True, 10, seed=9))
    assert found.predictions.shape == (10, 2)
    assert found.metrics["test_loss"] > 0


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"dataloader_num_workers": 1}])
def test_arguments_that_do_not_change_the_result(changes, tmp_path):
    ends = []
    for name, given in (("plain", {}), ("changed", changes)):
        trainer = hf.make_trainer("llama", tmp_path / name, key=lc.SecretKey.from_bytes(KEY), **given)
        hf.fix_id(trainer, "one")
        trainer.train()
        ends.append(hf.weights(trainer.model))
    hf.assert_same(*ends, tolerance=1e-6)


def test_bfloat16_trains(tmp_path):
    trainer = hf.make_trainer("gpt2", tmp_path / "out", bf16=True)
    trainer.train()
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_a_plan_with_bins_and_empty_batches(tmp_path):
    """Balls-in-Bins, six examples in six bins: with this key some steps are pure noise."""
    plan, key = oracle.binned_plan(6, 1, 2), lc.SecretKey.from_bytes(KEY)
    sizes = [len(batch) for batch in plan.sampling.batches(key, run="one")]
    assert 0 in sizes
    assert max(sizes) > 1
    trainer = hf.make_trainer("bert", tmp_path / "out", plan=plan, train_dataset=hf.Sentences(True, 6), key=key)
    hf.fix_id(trainer, "one")
    trainer.train()
    assert trainer.state.global_step == plan.steps == 12


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path):
    model = hf.make_model("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = hf.make_trainer("bert", tmp_path / "out", model=model, optimizers=(optimizer, schedule))
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**trainer.plan.steps)


def test_a_backward_pass_between_steps_changes_nothing(tmp_path):
    """What a callback leaves behind before the batch is taken is not the plan's batch, and is dropped."""
    ends = []
    for name, callbacks in (("plain", []), ("meddled", [hf.Meddler("on_step_begin", hf.backward)])):
        trainer = hf.make_trainer("bert", tmp_path / name, key=lc.SecretKey.from_bytes(KEY), callbacks=callbacks)
        hf.fix_id(trainer, "one")
        trainer.train()
        ends.append(hf.weights(trainer.model))
    hf.assert_same(*ends)


def test_stopping_early_keeps_the_claim(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    trainer = hf.make_trainer("bert", tmp_path / "out", callbacks=[Stop()])
    trainer.train()
    spent = trainer.private.spent()
    assert (spent.steps_taken, spent.epsilon) == (3, trainer.plan.epsilon)
    with pytest.raises(lc.TrainingError, match="has taken 3 of 8 steps"):
        trainer.train()


def test_after_training_the_model_is_plain_again(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    hf.backward(trainer.model, None)
    assert trainer.model.classifier.weight.grad is not None
    assert "forward" not in trainer.model.classifier.__dict__


def test_the_key_lies_beside_the_output_folder_and_never_in_it(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    assert trainer.private.run.key.path == tmp_path / "out.private" / "run.key"
    assert (tmp_path / "out.private").stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidInput, match="outside the output folder"):
        hf.make_trainer("bert", tmp_path / "out", key=tmp_path / "out" / "run.key").train()
    given = hf.make_trainer("bert", tmp_path / "other", key=tmp_path / "elsewhere.key")
    given.train()
    assert lc.SecretKey.load(tmp_path / "elsewhere.key").ledger().runs()


def test_a_second_run_with_the_same_key_has_noise_of_its_own(tmp_path):
    ends = []
    for _ in range(2):
        trainer = hf.make_trainer("bert", tmp_path / "out")
        trainer.train()
        ends.append(hf.weights(trainer.model))
    assert not torch.equal(ends[0]["classifier.weight"], ends[1]["classifier.weight"])


def test_importing_the_library_imports_no_trainer():
    code = (
        "import sys, lambdacgd as lc; lc.plan, lc.privatize, lc.export; "
        "print([name for name in ('transformers', 'accelerate', 'lightning', 'peft') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_on_a_gpu_the_trainer_equals_the_loop_by_hand_on_a_cpu(lora, tmp_path):
    """The noise of both agrees to rounding, and so do the weights after a few steps of SGD; then once in bfloat16."""
    key, common = lc.SecretKey.from_bytes(KEY), {"optim": "sgd", "learning_rate": 0.5, "tf32": False}
    ends = []
    for name, device in (("cpu", True), ("gpu", False)):
        trainer = hf.make_trainer("llama", tmp_path / name, lora=lora, key=key, use_cpu=device, **common)
        hf.fix_id(trainer, "one")
        trainer.train()
        ends.append({n: p.cpu() for n, p in hf.weights(trainer.model).items()})
    hf.assert_same(*ends, tolerance=1e-3)
    half = hf.make_trainer("llama", tmp_path / "half", lora=lora, use_cpu=False, bf16=True, gradient_checkpointing=True)
    half.train()
    assert all(bool(p.isfinite().all()) for p in half.model.parameters())
