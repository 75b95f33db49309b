"""The training experiments end to end on a made-up CIFAR-10: worker processes, resuming, the quick versions, BERT."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from reproduce import framework
from reproduce.framework import Settings
from reproduce.methods_table import cifar_page, plot
from reproduce.pool import Worker, _Pace, solve
from reproduce.problems import DistinctWords, ReviewLSTM, packed, problem
from reproduce.runs import PlanBook, RunStore, TrainingRun
from reproduce.search import method_search
from reproduce.trainer import compute_with, plan_requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 in torchvision's layout: 400 training and 80 test images of noise with a bright class-dependent band."""
    where = tmp_path_factory.mktemp("data") / "cifar-10-batches-py"
    where.mkdir()
    random = np.random.default_rng(3)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = random.integers(0, 10, 80)
        images = random.integers(0, 128, (80, 3, 32, 32), dtype=np.uint8)
        for i, label in enumerate(labels):
            images[i, :, 3 * label : 3 * label + 3] += 127
        content = {b"data": images.reshape(80, -1), b"labels": labels.tolist()}
        (where / name).write_bytes(pickle.dumps(content))
    return where.parent


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name",
    [
        "amplified-sweep",
        pytest.param("methods-cifar", marks=pytest.mark.slow),
        pytest.param("lambda-sweep", marks=pytest.mark.slow),
        pytest.param("epochs-sweep", marks=pytest.mark.slow),
    ],
)
def test_quick_versions(name: str, folder: Path, tmp_path: Path) -> None:
    rows = framework.reproduce(framework.load(name), tmp_path, settings=Settings(quick=True, data=folder, device="cpu"))
    assert len(rows) == 2
    assert all(row["training_seconds"] > 0 for row in rows)
    page = (tmp_path / f"{name}.md").read_text()
    assert "A quick version" in page
    assert (tmp_path / f"{name}.svg").exists()
    assert (tmp_path / f"{name}.png").exists()


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    experiment = framework.load("methods-cifar")
    settings = Settings(quick=True, data=tmp_path, device="cpu")
    with pytest.raises(ValueError, match="--data DIR"):
        experiment.compute(experiment.cells(settings)[0], settings)


def test_an_interrupted_search_goes_on_in_its_folder_and_another_begins_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = {
        "task": "digits", "model": "mlp", "batch_size": 64, "epochs": 1, "max_grad_norm": 1.0, "tries": 3, "seeds": 1,
        "splits": ["validation", "test"], "learning_rate": 0.5, "method": "dp-sgd", "epsilon": 8.0,
    }  # fmt: skip
    experiment = framework.Experiment(
        "search", "", lambda settings: [cell], compute_with(method_search), ("test",), lambda rows: ""
    )
    trained: list[TrainingRun] = []
    stop_at = 3

    def train(run: TrainingRun, *rest: object, **how: object) -> dict[str, object]:
        trained.append(run)
        if len(trained) == stop_at:
            raise KeyboardInterrupt
        return {"accuracy": {"last": 0.5}, "seconds": 1.0, "sigma": 1.0, "certificate": {}}

    monkeypatch.setattr("reproduce.trainer.train", train)
    with pytest.raises(KeyboardInterrupt):
        framework.reproduce(experiment, tmp_path / "one", settings=Settings(device="cpu"))
    assert len(framework.reproduce(experiment, tmp_path / "one", settings=Settings(device="cpu"))) == 1
    assert len(trained) == 3 + 2  # the interrupted run once more, and the test
    framework.reproduce(experiment, tmp_path / "two", settings=Settings(device="cpu"))
    assert len(trained) == 5 + 4


def test_workers_answer_searches_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    base = {
        "task": "digits", "model": "mlp", "batch_size": 64, "epochs": 1, "max_grad_norm": 1.0, "tries": 3, "seeds": 2,
        "splits": ["validation", "test"], "learning_rate": 0.5, "moves": [],
    }  # fmt: skip
    cells = [base | {"method": name, "epsilon": 8.0} for name in ("lambda-cgd", "dp-sgd")]
    without_plan = base | {"method": "lambda-cgd", "epsilon": 2.0, "tries": 1}
    plans = PlanBook(tmp_path / "plans.jsonl", make=True)
    for cell in cells:
        for request in plan_requests(cell):
            plans.get(request)
    torch.save(packed(problem("digits").load(None)), tmp_path / "digits.pt")
    worker = Worker({"digits": tmp_path / "digits.pt"}, tmp_path / "plans.jsonl", "cpu")
    said: list[str] = []

    def run(**how) -> dict:
        searches = [(f"{cell['method']} {cell['epsilon']:g}", method_search(cell)) for cell in (without_plan, *cells)]
        store = RunStore(tmp_path / "runs.jsonl")
        return solve(searches, store, worker, parallel=1, until=time.monotonic() + 600, say=said.append, **how)

    assert run(allow=lambda run: run.split == "validation") == {}
    assert len(RunStore(tmp_path / "runs.jsonl")) == 6
    rows = run()
    assert set(rows) == {"lambda-cgd 8", "dp-sgd 8"}
    failed = [line for line in said if "FAILED" in line]  # a run without its plan fails, the others go on
    assert len(failed) == 2
    assert all("make it where the accountants are" in line for line in failed)
    assert len(said) - len(failed) == 10  # the second time only the tests were trained
    assert all(row["test"] > 0.4 for row in rows.values())


def test_a_slow_method_does_not_stop_the_quick_ones() -> None:
    pace = _Pace()
    slow, quick, unseen = (
        TrainingRun("cifar10", "cnn", name, 8.0, 128, 10, 1.0, 0.3, None) for name in ("blt", "bisr-2", "bisr-16")
    )
    assert pace.expected(slow) == 0
    pace.saw(slow, {"seconds": 80.0, "training_examples": 40_000})
    pace.saw(quick, {"seconds": 8.0, "training_examples": 40_000})
    pace.saw(quick, {"seconds": 4.0, "training_examples": 40_000})
    assert [pace.expected(run) for run in (slow, quick, unseen)] == pytest.approx([80, 8, 80])
    for _ in range(_Pace.FEW):  # one that was slow once is forgotten
        pace.saw(quick, {"seconds": 4.0, "training_examples": 40_000})
    assert pace.expected(quick) == pytest.approx(4)


@pytest.mark.slow
def test_commands_plan_train_and_collect_in_bulk(folder: Path, tmp_path: Path) -> None:
    plans = tmp_path / "training" / "plans.jsonl"

    def bulk(*options: str) -> str:
        command = [sys.executable, "-m", "reproduce", "bulk", *options, "--experiment", "methods-cifar"]
        command += ["--plans", str(plans), "--quick"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout

    bulk("plans")
    trained = bulk("train", "--data", str(folder), "--parallel", "2", "--minutes", "3", "--out", str(plans.parent))
    assert "2 of 2 cells complete" in trained
    assert "methods-cifar: 2 cells" in bulk("collect", "--out", str(tmp_path / "results"))
    assert (tmp_path / "results" / "methods-cifar" / "methods-cifar.md").exists()


def test_pages_mark_the_best_and_say_what_is_missing() -> None:
    tried = [{"learning_rate": rate, "max_grad_norm": 0.3, "schedule": "constant"} for rate in (0.5, 1.0, 2.0)]
    found = {
        "learning_rate": 1.0, "max_grad_norm": 0.3, "lambda": None, "schedule": "constant", "weights": "last",
        "sigma": 0.5, "validation": 0.5, "tried": tried, "batch_size": 128, "epochs": 10, "standard_error": 0.004,
    }  # fmt: skip
    rows = [
        found | {"method": "dp-sgd", "epsilon": 8.0, "test": 0.56},
        found | {"method": "lambda-cgd-fresh", "epsilon": 8.0, "test": 0.67, "lambda": 0.9},
        found | {"method": "dp-sgd", "epsilon": 2.0, "test": 0.5},
    ]
    page = cifar_page(rows)
    assert "| DP-λCGD, fresh bins (ours) | **67.0 ± 0.4** | — |" in page
    assert "| DP-SGD (Poisson) | 56.0 ± 0.4 | **50.0 ± 0.4** |" in page
    assert "- **DP-λCGD, fresh bins against DP-SGD (Poisson)**: +11.0 ± 0.6 at ε = 8." in page
    assert "What comes out" not in cifar_page(rows[:1])
    assert "Every search of three rates and more ended between the smallest and the largest it tried." in page
    smallest = rows[0] | {"learning_rate": 0.5}
    assert "Ended at the edge of what was tried: DP-SGD (Poisson) at ε = 8." in cifar_page([smallest, *rows[1:]])
    two = rows[0] | {"learning_rate": 0.5, "tried": tried[:2]}  # always at an edge
    assert "Ended at the edge" not in cifar_page([two, *rows[1:]])
    more = rows[0] | {"tried": [*tried, *tried]}  # a search that moved outwards spent more of the budget
    assert "the same budget, at most 6 runs, from the same learning rates" in cifar_page([more, *rows[1:]])
    assert plot(rows) is not None


def test_a_model_that_reads_in_order_takes_private_steps() -> None:
    from reproduce.data import Examples, Splits
    from reproduce.problems import Data
    from reproduce.trainer import train

    tokens = torch.randint(1, 20_000, (60, 12), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    tokens[:, 9:] = 0
    reviews = Examples(tokens, (tokens[:, 0] % 2).long())
    data = Data("imdb", Splits(reviews, reviews, 2), torch.device("cpu"))
    run = TrainingRun("imdb", "lstm", "lambda-cgd", 8.0, 12, 1, 0.1, 1.0, lam=0.8)
    result = train(run, data, PlanBook(make=True))
    assert result["steps"] == 4
    assert 0 <= result["accuracy"]["last"] <= 1


def test_sizes_of_the_models_for_reviews() -> None:
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ReviewLSTM(), DistinctWords())]
    assert sizes == [137_538, 131_106]


def test_the_lstm_reads_in_order_and_no_padding() -> None:
    torch.manual_seed(3)
    model, tokens = ReviewLSTM(vocabulary=50), torch.randint(1, 50, (4, 9))
    with torch.no_grad():
        found = model(tokens)
        torch.testing.assert_close(model(torch.nn.functional.pad(tokens, (0, 5))), found)
        assert not torch.allclose(model(tokens.flip(1)), found, atol=1e-4)
        longer = torch.cat([tokens.repeat(1, 15), tokens], 1)
        torch.testing.assert_close(model(longer), model(longer[:, : ReviewLSTM.LENGTH]))
