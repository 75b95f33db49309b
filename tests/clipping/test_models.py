"""Whole models, randomly initialised: exact in float64, agreement with Opacus, mixed precision, frozen parts, LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import attach, check_model, convert
from reproduce.bench_models import CNN, Bert, LSTMClassifier, ViT, WideResNet

Oracle = Callable[..., None]
SEED = 11


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labels(n: int, classes: int = 2) -> Tensor:
    return torch.randint(0, classes, (n,))


@pytest.mark.parametrize(
    ("make", "size"),
    [(lambda: ViT(16, 2, 2, patch=4, image=16), 16), (lambda: WideResNet(10, 1), 8), (CNN, 32)],
    ids=["vit", "wide-resnet", "cnn"],
)
def test_image_models(oracle: Oracle, make: Callable[[], nn.Module], size: int) -> None:
    oracle(make(), (torch.randn(3, 3, size, size).double(), labels(3)), 3, loss=classify)


def test_resnet_of_hugging_face(oracle: Oracle) -> None:
    import transformers as t

    model = convert(
        t.ResNetForImageClassification(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]))
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])

    oracle(model, (torch.randn(3, 3, 32, 32).double(), labels(3)), 3, loss=loss)


def test_lstm(oracle: Oracle) -> None:
    model = convert(LSTMClassifier(20, 6, 8))
    oracle(model, (torch.randint(0, 20, (3, 7)), labels(3)), 3, loss=classify)


def test_bert(oracle: Oracle) -> None:
    oracle(Bert(16, 2, 2, vocabulary=30), (torch.randint(1, 30, (3, 9)), labels(3)), 3, loss=classify)


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean over examples of the mean over each example's own real tokens."""
    ids, mask = batch
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
    return (each.sum(1) / mask[:, 1:].sum(1)).mean()


def _hugging_face(kind: str) -> nn.Module:
    import transformers as t

    if kind == "gpt2":  # tied embedding and head, positions without a batch dimension
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=25, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
    if kind == "llama":
        return t.LlamaForCausalLM(
            t.LlamaConfig(
                vocab_size=25,
                hidden_size=16,
                intermediate_size=20,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=25,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=1,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-tied"])
def test_language_models_with_padding(oracle: Oracle, kind: str) -> None:
    ids = torch.randint(1, 25, (4, 7))
    mask = (torch.arange(7) < torch.tensor([7, 4, 5, 2])[:, None]).long()
    oracle(_hugging_face(kind), (ids, mask), 4, loss=language_loss)


def test_bert_with_positions_of_its_own(oracle: Oracle) -> None:
    import transformers as t

    config = t.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1])

    oracle(t.BertForSequenceClassification(config), (torch.randint(1, 30, (3, 6)), labels(3)), 3, loss=loss)


def test_vit_of_hugging_face(oracle: Oracle) -> None:
    import transformers as t

    config = t.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])

    oracle(t.ViTForImageClassification(config), (torch.randn(3, 3, 8, 8).double(), labels(3)), 3, loss=loss)


def test_relative_positions_of_t5(oracle: Oracle) -> None:
    import transformers as t

    config = t.T5Config(vocab_size=25, d_model=16, d_kv=8, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(input_ids=batch).last_hidden_state.tanh().mean((1, 2)).mean()  # type: ignore[no-any-return]

    # T5 takes means of squares in float32 whatever its weights are.
    oracle(t.T5EncoderModel(config), torch.randint(1, 25, (3, 6)), 3, loss=loss, tolerance=1e-6)


def test_checkpointing_of_hugging_face() -> None:
    model = _hugging_face("gpt2")
    ids = torch.randint(1, 25, (3, 6))
    batch = (ids, torch.ones_like(ids))
    clipper = attach(model, 0.1)
    language_loss(model, batch).backward()
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    language_loss(model, batch).backward()
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


def test_lora_adapters(oracle: Oracle) -> None:
    import peft

    base = _hugging_face("llama")
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    ids = torch.randint(1, 25, (3, 6))
    # Llama normalises in float32 whatever its weights are, which here is not hidden by larger gradients.
    oracle(model, (ids, torch.ones_like(ids)), 3, loss=language_loss, tolerance=1e-5)
    assert any(not p.requires_grad for p in model.parameters())


def test_transformer_encoder_of_torch(oracle: Oracle) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    oracle(convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), torch.randn(3, 5, 8).double(), 3)


def test_frozen_parts_cost_nothing(oracle: Oracle) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    oracle(model, torch.randn(4, 4).double(), 4)
    clipper = attach(model, 1.0)
    assert "forward" not in model[0].__dict__
    assert set(clipper.take()) == {"2.bias", "4.weight", "4.bias"}
    clipper.detach()


def test_siamese_use_in_one_backward_pass(oracle: Oracle) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[:, 0]) * self.net(x[:, 1])

    oracle(Pair(), torch.randn(4, 2, 2, 4).double(), 4)


def _opacus_sum(model: nn.Module, batch: tuple[Tensor, Tensor], clip: float) -> dict[str, Tensor]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classify(wrapped, batch).backward()
    each = {n.removeprefix("_module."): p.grad_sample for n, p in wrapped.named_parameters()}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factor = (clip / norms).clamp_max(1)
    total = {n: torch.einsum("b,b...->...", factor, g).detach() for n, g in each.items()}
    wrapped.remove_hooks()
    for p in model.parameters():
        p.grad = None
    return total


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 3, stride=2), nn.InstanceNorm1d(4, affine=True)),
    "conv2d": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, dilation=2, groups=3), nn.GroupNorm(2, 6), nn.LayerNorm(4)),
    "conv3d": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 2, padding=1), nn.RMSNorm(9)),
}


@pytest.mark.parametrize("kind", ["cnn", "bert", "mlp", *_LAYERS])
def test_agreement_with_opacus(kind: str) -> None:
    pytest.importorskip("opacus")
    if kind == "bert":
        model: nn.Module = Bert(16, 2, 2, vocabulary=30)
        batch = (torch.randint(1, 30, (4, 6)), labels(4))
    elif kind in _LAYERS:
        model, batch = nn.Sequential(_LAYERS[kind](), nn.Flatten()), (torch.randn(4, 3, 8, 8), labels(4))
    else:
        model = (
            WideResNet(10, 1)
            if kind == "cnn"
            else nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2))
        )
        batch = (torch.randn(4, 3, 8, 8), labels(4))
    theirs = _opacus_sum(model, batch, 0.5)
    clipper = attach(model, 0.5)
    classify(model, batch).backward()
    ours = clipper.take()
    size = torch.stack([t.norm() for t in theirs.values()]).norm()
    assert all(float((ours[n] - t).norm()) <= 1e-4 * float(size) for n, t in theirs.items())


def _with_loss(kind: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    """A model, a batch of six examples and a mean over examples."""
    images, words = torch.randn(6, 3, 16, 16), torch.randint(1, 25, (6, 9))
    if kind == "gpt2":
        return _hugging_face("gpt2"), (words, torch.ones_like(words)), language_loss
    if kind in ("bert", "lstm"):
        model = Bert(32, 2, 2, vocabulary=25) if kind == "bert" else convert(LSTMClassifier(25, 16, 16))
        return model, (words, labels(6)), classify
    return ViT(32, 2, 4, patch=4, image=16) if kind == "vit" else WideResNet(10, 1), (images, labels(6)), classify


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["vit", "cnn", "bert", "gpt2", "lstm"])
def test_autocast_stays_near_float32(dtype: torch.dtype, kind: str) -> None:
    """A stated loose bound: 16-bit activations change gradients by percents, not more."""
    model, batch, mean_loss = _with_loss(kind)
    clipper = attach(model, 0.5)
    totals = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = mean_loss(model, batch)
        loss.backward()
        totals.append({n: t.clone() for n, t in clipper.take().items()})
    size = torch.stack([t.norm() for t in totals[0].values()]).norm()
    away = torch.stack([(totals[0][n] - totals[1][n]).norm() for n in totals[0]]).norm()
    assert all(t.dtype == torch.float32 for t in totals[1].values())
    assert float(away) <= 0.08 * float(size)


def test_bfloat16_parameters_are_summed_in_float32() -> None:
    model = ViT(32, 1, 4, patch=4, image=8).to(torch.bfloat16)
    clipper = attach(model, 0.5)
    classify(model, (torch.randn(5, 3, 8, 8).bfloat16(), labels(5))).backward()
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in clipper.take().values())


def test_check_model_passes_on_a_good_model() -> None:
    report = check_model(Bert(16, 1, 2, vocabulary=30), (torch.randint(1, 30, (3, 6)), labels(3)), loss=classify)
    assert report.examples == 3
    assert max(report.differences.values()) < 1e-9


def _standardised(weight: Tensor) -> Tensor:
    inner = tuple(range(1, weight.dim()))
    return (weight - weight.mean(inner, keepdim=True)) / (weight.std(inner, keepdim=True) + 1e-5)


class StandardisedConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, _standardised(self.weight), self.bias)


class Standardise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return _standardised(weight)


@pytest.mark.parametrize("how", ["subclass", "parametrisation"])
@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"stride": 2, "groups": 2}, {"padding": 1, "padding_mode": "circular"}]
)
def test_weight_standardised_convolutions(oracle: Oracle, how: str, options: dict[str, Any]) -> None:
    kind = StandardisedConv if how == "subclass" else nn.Conv2d
    layers = [kind(4, 4, 3, **options) for _ in range(2)]
    if how == "parametrisation":
        for layer in layers:
            nn.utils.parametrize.register_parametrization(layer, "weight", Standardise())
    model = nn.Sequential(layers[0], nn.GroupNorm(2, 4), nn.ReLU(), layers[1], nn.Flatten())
    oracle(model, torch.randn(5, 4, 9, 9, dtype=torch.float64), 5)
