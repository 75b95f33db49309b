"""One loss per example: from logits and labels, and whatever mixes examples is refused before the first step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
from transformers.trainer_pt_utils import LabelSmoother

import lambdacgd as lc
from lambdacgd.clipping import check_model
from lambdacgd.errors import InvalidInput
from lambdacgd.integrations.huggingface import LambdaCGDTrainer, kind_of, per_example
from tests.integrations import hf

SEED = 5


class Config:
    problem_type = None


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


def test_every_examples_tokens_are_averaged_among_themselves():
    logits = numbers(3, 5, 7)
    labels = torch.tensor([[1, 2, 3, 4, 5], [1, 2, -100, -100, -100], [-100] * 5])
    found = per_example("next-token", logits, labels, Config())
    assert float(found[0]) == pytest.approx(float(F.cross_entropy(logits[0, :4], labels[0, 1:])))
    assert float(found[1]) == pytest.approx(float(F.cross_entropy(logits[1, :1], labels[1, 1:2])))
    assert float(found[2]) == 0.0
    other = labels.clone()
    other[0, 1:4] = -100  # another example's tokens are no concern of this one
    assert torch.equal(per_example("next-token", logits, other, Config())[1:], found[1:])
    unshifted = per_example("tokens", logits, labels, Config())
    assert float(unshifted[1]) == pytest.approx(float(F.cross_entropy(logits[1, :2], labels[1, :2])))


def test_virtual_tokens_in_front_have_no_labels():
    logits, labels = numbers(2, 8, 7), torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(
        per_example("next-token", logits, labels, Config()), per_example("next-token", logits[:, 5:], labels, Config())
    )


@pytest.mark.parametrize("labels", [torch.tensor([0, 2, 1]), torch.tensor([0, -100, 1])], ids=["all", "one unlabelled"])
def test_whole_examples_of_one_class(labels):
    logits = numbers(3, 4)
    found = per_example("whole", logits, labels, Config())
    for row in range(3):
        alone = 0.0 if labels[row] == -100 else float(F.cross_entropy(logits[row : row + 1], labels[row : row + 1]))
        assert float(found[row]) == pytest.approx(alone)


def test_regression_and_several_classes_at_once():
    one = per_example("whole", numbers(3, 1), torch.tensor([0.5, 1.0, -1.0]), Config())
    assert torch.allclose(one, (numbers(3, 1)[:, 0] - torch.tensor([0.5, 1.0, -1.0])) ** 2)
    targets = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    many = per_example("whole", numbers(2, 2), targets, Config())
    assert torch.allclose(many, F.binary_cross_entropy_with_logits(numbers(2, 2), targets, reduction="none").mean(1))


@pytest.mark.parametrize("kind", ["next-token", "whole"])
def test_label_smoothing_is_the_trainers(kind):
    """On one example alone, where the Trainer's smoothing mixes nothing."""
    logits, labels = (numbers(1, 5, 7), torch.tensor([[1, 2, 3, -100, 5]])) if kind == "next-token" else (
        numbers(1, 7), torch.tensor([3])
    )  # fmt: skip
    theirs = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=kind == "next-token")
    assert float(per_example(kind, logits, labels, Config(), 0.1)[0]) == pytest.approx(float(theirs), rel=1e-5)


def test_kinds_of_models():
    assert kind_of(hf.make_model("bert")) == "whole"
    assert kind_of(hf.make_model("gpt2")) == "next-token"
    assert kind_of(hf.make_model("llama", lora=True)) == "next-token"
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2))
    with pytest.raises(InvalidInput, match="one loss per example"):
        kind_of(t5)


FAMILIES = {
    "RobertaForSequenceClassification": {
        "max_position_embeddings": 20,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "DistilBertForSequenceClassification": {
        "dim": 12,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "MistralForCausalLM": {"num_key_value_heads": 1},
    "GemmaForCausalLM": {"num_key_value_heads": 1, "head_dim": 6},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.0},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_more_families_are_exact(name):
    """Against one example at a time, by autograd, with the loss of the Trainer."""
    import transformers

    make = getattr(transformers, name)
    common = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(SEED)
    model = make(make.config_class(vocab_size=hf.VOCABULARY, **(common | FAMILIES[name])))
    data = hf.Sentences(name.endswith("Classification"))

    def loss(model, batch):
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return per_example(kind_of(model), outputs.logits, batch["labels"], model.config).mean()

    # Several families normalise in float32, and so does the loss, whatever the weights are.
    assert check_model(model, hf.collate([data[i] for i in range(4)]), loss=loss, tolerance=1e-5).examples == 4


# --- what mixes examples ---------------------------------------------------------------------------------------------


def average(outputs, labels, **kwargs):
    return F.cross_entropy(outputs.logits, labels)


def over_all(outputs, labels, **kwargs):
    return F.cross_entropy(outputs.logits, labels, reduction="none") / len(labels)


def contrastive(outputs, labels, **kwargs):
    return F.cross_entropy(outputs.logits, labels, reduction="none") + (outputs.logits @ outputs.logits.t()).logsumexp(
        1
    )


@pytest.mark.parametrize(
    ("loss", "says"),
    [(average, "one loss per example"), (over_all, "depends on the other"), (contrastive, "depends on the other")],
)
def test_losses_that_mix_examples_are_refused(loss, says, tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", compute_loss_func=loss)
    before = hf.weights(trainer.model)
    with pytest.raises((lc.TrainingError, lc.ClippingError), match=says):
        trainer.train()
    hf.assert_same(before, hf.weights(trainer.model))


class Sorted(hf.Sentences):
    """All examples of one class, then all of the other."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"labels": int(index >= len(self) // 2)}


def balanced(outputs, labels, **kwargs):
    """Class weights that are divided by those of the batch, as cross_entropy's mean does."""
    weights = torch.tensor([1.0, 3.0])[labels]
    return F.cross_entropy(outputs.logits, labels, reduction="none") * weights / weights.mean()


def test_a_loss_that_mixes_classes_is_refused_for_sorted_data_too(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", compute_loss_func=balanced, train_dataset=Sorted(True))
    with pytest.raises(lc.ClippingError, match="depends on the other"):
        trainer.train()


class TokenMean(LambdaCGDTrainer):
    """What subclasses of the plain Trainer do: all tokens of the batch in one mean."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].transpose(1, 2)
        each = F.cross_entropy(logits, labels[:, 1:], ignore_index=-100, reduction="none").sum(1)
        if not self.scalar:
            return each / (labels[:, 1:] != -100).sum()
        return each.sum() / (labels[:, 1:] != -100).sum()


@pytest.mark.parametrize("scalar", [True, False])
def test_a_subclass_with_a_mean_over_all_tokens_is_refused(scalar, tmp_path):
    trainer = hf.make_trainer("gpt2", tmp_path / "out", cls=TokenMean)
    trainer.scalar = scalar
    says = "one loss per example" if scalar else "depends on the other"
    with pytest.raises((lc.TrainingError, lc.ClippingError), match=says):
        trainer.train()


def test_a_loss_that_begins_to_mix_later_is_refused_where_it_can_be_seen(tmp_path):
    """The check before training is no proof, but an average in place of a vector is refused at any step."""

    class Turns(LambdaCGDTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            each = super().compute_loss(model, inputs)
            return each.mean() if self.state.global_step == 2 else each

    trainer = hf.make_trainer("bert", tmp_path / "out", cls=Turns)
    with pytest.raises(lc.TrainingError, match="one loss per example"):
        trainer.train()
    assert trainer.private.steps_taken == 2


def test_padding_that_moves_positions_is_refused(tmp_path):
    """Padded on the left, GPT-2 counts positions from the longest example of the batch, and any model predicts an
    example's first token from padding, unless there is none.
    """

    def on_the_left(items):
        batch = hf.collate(items)
        lengths = batch["attention_mask"].sum(1).tolist()
        for name, x in batch.items():
            batch[name] = torch.stack([row.roll(len(row) - n) for row, n in zip(x, lengths, strict=True)])
        return batch

    for kind in ("gpt2", "llama"):
        with pytest.raises(lc.ClippingError, match="pad on the right"):
            hf.make_trainer(kind, tmp_path / kind, data_collator=on_the_left).train()


def test_a_missing_attention_mask_is_refused(tmp_path):
    def without(items):
        return {name: x for name, x in hf.collate(items).items() if name != "attention_mask"}

    model = hf.make_model("bert")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # far from the start, where attention matters
    with pytest.raises(lc.ClippingError, match="attention mask"):
        hf.make_trainer("bert", tmp_path / "out", model=model, data_collator=without).train()


def test_a_collator_with_random_numbers_passes(tmp_path):
    """Masked language modelling: another reading masks other tokens, which is no mixing."""
    config = BertConfig(
        vocab_size=hf.VOCABULARY, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )

    def masked(items):
        batch = hf.collate(items)
        hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["attention_mask"] == 1)
        batch["labels"] = batch["input_ids"].masked_fill(~hidden, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
        return batch

    data, model = hf.Sentences(False), BertForMaskedLM(config)
    trainer = hf.make_trainer("bert", tmp_path / "out", model=model, data_collator=masked, train_dataset=data)
    trainer.train()
    assert trainer.private.finished
