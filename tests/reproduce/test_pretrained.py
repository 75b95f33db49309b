"""Fine-tuning pretrained weights in ``fine-tuning``: a small BERT saved as a hub would, on made-up reviews."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lambdacgd.errors import InvalidInput
from reproduce import framework, pretrain, problems
from reproduce.__main__ import main
from reproduce.framework import Settings
from reproduce.sweeps import lambda_cells

transformers = pytest.importorskip("transformers")


def _save(folder: Path, vocabulary: int = 30_522, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=256,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return _save(tmp_path / "weights")


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    for split in ("train", "test"):
        lengths = random.integers(4, 12, 320).astype(np.uint16)
        tokens = random.integers(1, 30_522, lengths.sum()).astype(np.uint16)
        labels = np.repeat(np.array([0, 1], dtype=np.uint8), 160)
        np.savez(tmp_path / f"{split}_wordpiece512.npz", tokens=tokens, lengths=lengths, labels=labels)
    return tmp_path


def test_a_name_is_the_content_not_the_place(weights: Path, tmp_path: Path) -> None:
    name = problems.register_weights(weights)
    assert problems.is_pretrained(name)
    assert problems.register_weights(_save(tmp_path / "same")) == name
    assert problems.register_weights(_save(tmp_path / "other", seed=2)) != name


def test_no_cells_without_weights() -> None:
    with pytest.raises(InvalidInput, match="--weights"):
        framework.load("fine-tuning").cells(Settings())


def test_pretrained_layers_are_kept_and_the_output_layer_is_new(weights: Path) -> None:
    name = problems.register_weights(weights)
    saved = transformers.BertModel.from_pretrained(weights).state_dict()
    torch.manual_seed(3)
    made = problems.make_pretrained(name)
    for key, value in saved.items():
        torch.testing.assert_close(made.state_dict()[f"bert.{key}"], value, rtol=0, atol=0)
    torch.manual_seed(4)
    assert not torch.equal(problems.make_pretrained(name).classifier.weight, made.classifier.weight)


def test_a_bert_is_fine_tuned_in_the_pool(
    weights: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path / "cache"))
    plans, common = tmp_path / "plans.jsonl", ["--experiment", "fine-tuning", "--quick", "--weights", str(weights)]
    common += ["--plans", str(plans)]
    assert main(["bulk", "plans", *common]) == 0
    given = ["--data", str(reviews), "--out", str(tmp_path), "--parallel", "1", "--device", "cpu"]
    assert main(["bulk", "train", *common, *given]) == 0
    assert main(["bulk", "collect", *common, "--out", str(tmp_path / "results")]) == 0
    page = (tmp_path / "results" / "fine-tuning" / "fine-tuning.md").read_text()
    for name in ("DP-SGD", "normalised DP-λCGD, fresh bins"):
        assert name in page
    names = {json.loads(line)["run"]["model"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()}
    assert names == {problems.register_weights(weights)}


def test_sweeps_fine_tune_reviews_only(weights: Path) -> None:
    cells = lambda_cells(Settings(weights=weights))
    assert {(cell["task"], cell["model"]) for cell in cells} == {("imdb", problems.register_weights(weights))}
    assert {cell["model"] for cell in lambda_cells(Settings())} == {"cnn", "words"}


def test_a_single_run_fine_tunes(weights: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path / "cache"))
    given = ["imdb", "--weights", str(weights), "--data", str(reviews), "--epsilon", "8", "--epochs", "1"]
    folder = tmp_path / "run"
    assert main(["train", *given, "--batch-size", "50", "--delta", "1e-3", "--lr", "0.1", "--out", str(folder)]) == 0
    assert (folder / "release").is_dir()
    assert main(["train", "--resume", str(folder)]) == 0  # the weights are in its settings
    assert main(["train", "digits", "--weights", str(weights), "--epsilon", "8"]) != 0


def test_what_does_not_fit_is_refused(reviews: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match=r"config\.json"):
        problems.register_weights(tmp_path / "empty")
    name = problems.register_weights(_save(tmp_path / "small", vocabulary=100))
    with pytest.raises(InvalidInput, match="the weights know 100"):
        problems.reviews(name, reviews)


def test_texts_go_through_the_weights_tokenizer(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": ["good film", "bad"], "label": [1, 0]}), tmp_path / f"{split}-0.parquet")
    (weights / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]))
    transformers.BertTokenizer(str(weights / "vocab.txt")).save_pretrained(weights)
    found = problems.reviews(problems.register_weights(weights), tmp_path).train
    rows = {tuple(row[row != 0].tolist()): int(label) for row, label in zip(found.inputs, found.labels, strict=True)}
    assert rows == {(2, 5, 7, 3): 1, (2, 6, 3): 0}


def test_weights_pretrained_here_are_fine_tuned(reviews: Path, tmp_path: Path) -> None:
    small = {"width": 8, "layers": 1, "length": 16, "batch": 4, "steps": 3, "say": lambda text: None}
    pretrain.learn(reviews, tmp_path / "bert", 60.0, torch.device("cpu"), **small)
    name = problems.register_weights(tmp_path / "bert")
    assert problems.make_pretrained(name).bert.config.hidden_size == 8


def test_masked_words_are_learnt() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30_522, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = torch.full((8, 16), 2000)
    tokens[:, 12:] = 0
    losses = []
    for _ in range(12):
        loss = pretrain.masked_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert torch.isfinite(pretrain.masked_loss(model, torch.zeros(2, 16, dtype=torch.int64)))  # nothing to hide
