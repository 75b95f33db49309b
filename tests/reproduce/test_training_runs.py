"""Runs as data: digests, the store that survives interruptions, and plans that belong to their requests."""

from __future__ import annotations

import json
import queue
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lambdacgd as lc
from lambdacgd.cli.options import plan_arguments
from lambdacgd.errors import InvalidInput
from reproduce import pool, trainer
from reproduce.data import Examples, Splits, load_digits
from reproduce.framework import RESULTS
from reproduce.pool import estimate
from reproduce.problems import Data, packed, sizes, unpacked
from reproduce.runs import METHODS, MissingPlan, PlanBook, RunStore, TrainingRun
from reproduce.search import method_search
from reproduce.trainer import TooLate, outcome, train

RUN = TrainingRun("digits", "mlp", "lambda-cgd", 8.0, 16, 1, 0.5, 1.0, lam=0.8)


@pytest.fixture(scope="module")
def data() -> Data:
    return Data("digits", load_digits(), torch.device("cpu"))


def test_every_setting_changes_the_digest() -> None:
    others = [
        replace(RUN, lam=0.9), replace(RUN, method="lambda-cgd-fresh"), replace(RUN, epsilon=2.0),
        replace(RUN, learning_rate=0.25), replace(RUN, max_grad_norm=0.3), replace(RUN, schedule="linear"),
        replace(RUN, seed=1), replace(RUN, split="test"), replace(RUN, epochs=2), replace(RUN, examples=100),
        replace(RUN, method="dp-sgd", lam=None), replace(RUN, batch_size=8),
    ]  # fmt: skip
    assert len({run.digest for run in [RUN, *others]}) == 1 + len(others)
    assert TrainingRun(**json.loads(json.dumps(RUN.__dict__))).digest == RUN.digest


@pytest.mark.parametrize(
    "change", [{"lam": None}, {"epsilon": 0.0}, {"learning_rate": -1.0}, {"split": "train"}, {"schedule": "cosine"},
               {"method": "sgd"}, {"method": "dp-sgd"}], ids=str
)  # fmt: skip
def test_senseless_runs_are_refused(change: dict) -> None:
    with pytest.raises(InvalidInput):
        replace(RUN, **change)


def test_the_store_keeps_what_ended_and_passes_over_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    store = RunStore(path)
    store.add(RUN, {"accuracy": {"last": 0.5}})
    with path.open("a") as file:
        file.write('{"digest": "cut o')
    store = RunStore(path)
    store.add(replace(RUN, seed=1), {"accuracy": {"last": 0.6}})
    again = RunStore(None, read=[path])
    assert len(again) == 2
    assert again.get(RUN) == {"accuracy": {"last": 0.5}}
    assert again.get(replace(RUN, seed=2)) is None


def test_a_result_filed_under_another_run_does_not_count(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs.jsonl")
    store.add(RUN, {"accuracy": {"last": 0.5}})
    edited = (tmp_path / "runs.jsonl").read_text().replace('"epsilon": 8.0', '"epsilon": 2.0')
    (tmp_path / "runs.jsonl").write_text(edited)
    assert len(RunStore(tmp_path / "runs.jsonl")) == 0


def test_plans_are_made_once_and_missing_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    request = RUN.plan_request(1150)
    made = PlanBook(path, make=True).get(request)
    book = PlanBook(path)
    assert len(book) == 1
    assert request in book
    assert book.for_run(RUN, 1150) == made
    assert (
        made.sigma
        == lc.plan(
            1150, 16, epochs=1, epsilon=8.0, delta=1e-5, mechanism=lc.LambdaCGD(0.8), sampling=lc.BallsInBins("fixed")
        ).sigma
    )
    with pytest.raises(MissingPlan, match="make it where the accountants are"):
        book.for_run(RUN, 1437)


def test_a_plan_that_is_not_what_was_asked_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    PlanBook(path, make=True).get(RUN.plan_request(1150))
    for old, new in (('"lam": 0.8}', '"lam": 0.9}'), ('"epsilon": 8.0, "delta"', '"epsilon": 2.0, "delta"'),
                     ('"bins": "fixed", "lam"', '"bins": "fresh", "lam"')):  # fmt: skip
        content = path.read_text()
        assert old in content.split('"plan"')[0]
        request, plan = content.split('"plan"', 1)
        forged = tmp_path / "forged.jsonl"
        forged.write_text(request.replace(old, new) + '"plan"' + plan)
        book = PlanBook(forged)
        asked = json.loads(forged.read_text())["request"]
        with pytest.raises(InvalidInput):
            book.get(asked)


def test_a_plan_that_sets_nothing_aside_for_floating_point_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    with (RESULTS / "training" / "plans.jsonl").open() as file:
        earliest = next(file)  # of an earlier release
    path.write_text(earliest)
    assert json.loads(earliest)["request"] not in PlanBook(path)
    said: list[str] = []
    cell = {"task": "digits", "model": "mlp", "method": "lambda-cgd", "epsilon": 8.0, "batch_size": 16, "epochs": 1}
    cell |= {"learning_rate": 0.5, "max_grad_norm": 1.0, "lam": 0.8, "tries": 1, "seeds": 1}
    estimate([("one", method_search(cell))], RunStore(None), said.append, plans=PlanBook(path))
    assert said[-1].startswith("2 of these runs have no plan that covers floating point")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "bandinvmf-amplified-4"])
def test_every_method_can_be_planned(name: str) -> None:
    method = METHODS[name]
    request = {"examples": 200, "batch_size": 20, "epochs": 1, "epsilon": 8.0, "delta": 1e-3}
    asked = request | method.request(method.first(8.0))
    if isinstance(asked.get("bands"), int):
        asked["bands"] = min(asked["bands"], 4)
    plan = lc.plan(**plan_arguments(asked))
    assert plan.sigma > 0


def test_splits_are_disjoint_and_whole() -> None:
    x = torch.arange(1437).view(-1, 1).float()
    splits = Splits(Examples(x, torch.zeros(1437).long()), Examples(x[:10], torch.zeros(10).long()), 10)
    here = Data("digits", splits, torch.device("cpu"))
    (train_x, _), (held_x, _) = here.cut(RUN)
    assert (len(train_x), len(held_x)) == sizes(1437, RUN) == (1150, 287)
    assert sorted(torch.cat([train_x, held_x]).flatten().tolist()) == list(range(1437))
    (all_x, _), (test_x, _) = here.cut(replace(RUN, split="test"))
    assert len(all_x) == 1437
    assert len(test_x) == 10
    (few, _), (held, _) = here.cut(replace(RUN, examples=100))
    assert (len(few), len(held)) == (80, 20)


def test_packing_loses_nothing() -> None:
    splits = load_digits()
    back = unpacked(packed(splits))
    assert torch.equal(back.train.inputs, splits.train.inputs)
    assert (back.test.shift, back.test.scale, back.classes) == (splits.test.shift, splits.test.scale, splits.classes)


@pytest.mark.parametrize(("name", "lam"), [("dp-sgd", None), ("lambda-cgd", 0.8), ("bandmf", None)])
def test_a_run_learns(data: Data, name: str, lam: float | None) -> None:
    result = train(replace(RUN, method=name, lam=lam), data, PlanBook(make=True))
    assert set(result["accuracy"]) == {"last", "ema-0.99", "ema-0.998"}
    assert result["accuracy"]["last"] > 0.4  # guessing is 0.1; ε = 8 on 1 150 digits gives about 0.8
    assert result["steps"] == 71
    assert not result["captured"]


def test_bandmf_is_measured_where_the_library_refuses_it_and_says_so(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise InvalidInput("plan", "floating-point noise cannot be proven")

    for module in ("lambdacgd.training.step", "reproduce.trainer"):
        monkeypatch.setattr(f"{module}.cover", never)
    plans = PlanBook(make=True)
    assert train(replace(RUN, method="bandmf", lam=None), data, plans)["unproven"]
    with pytest.raises(InvalidInput, match="cannot be proven"):  # every other method stays refused
        train(RUN, data, plans)
    monkeypatch.undo()
    assert "unproven" not in train(replace(RUN, method="bandmf", lam=None), data, plans)


def test_a_linear_schedule_ends_at_a_twentieth(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = torch.optim.SGD.step

    def spy(self, *args, **kwargs):
        rates.append(float(self.param_groups[0]["lr"]))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    train(replace(RUN, schedule="linear"), data, PlanBook(make=True))
    assert rates[0] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.5 * (0.05 + 0.95 / 71))


def test_a_rate_that_blows_up_is_an_answer_and_another_error_is_not(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Exception = lc.NonFiniteSum("a sum was not finite")

    def fails(*args, **kwargs):
        raise said

    monkeypatch.setattr(trainer, "train", fails)
    plans = PlanBook(make=True)
    result = outcome(RUN, data, plans)
    assert set(result["accuracy"].values()) == {0.0}
    assert result["diverged"] == "a sum was not finite"
    assert result["sigma"] == plans.for_run(RUN, 1150).sigma

    said = lc.TrainingError("this run was detached")  # no news of the learning rate: it must not score 0
    with pytest.raises(lc.TrainingError):
        outcome(RUN, data, plans)


def test_workers_do_not_take_a_mistake_for_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args, **kwargs):
        raise lc.TrainingError("this run was detached")

    monkeypatch.setattr(trainer, "train", fails)
    PlanBook(tmp_path / "plans.jsonl", make=True).for_run(RUN, 1150)
    torch.save(packed(load_digits()), tmp_path / "digits.pt")
    tasks: queue.Queue = queue.Queue()
    done: queue.Queue = queue.Queue()
    for one in (RUN, None):
        tasks.put(one)
    worker = pool.Worker({"digits": tmp_path / "digits.pt"}, tmp_path / "plans.jsonl", "cpu", torch.get_num_threads())
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        pool._work(worker, tasks, done, 0.0)
    finally:
        for backend, allowed in zip(backends, before, strict=True):  # a worker sets them
            backend.allow_tf32 = allowed
    digest, result, _ = done.get_nowait()
    assert digest == RUN.digest
    assert result == {"failed": "TrainingError: this run was detached"}


def test_a_run_gives_up_in_time(data: Data) -> None:
    with pytest.raises(TooLate):
        train(RUN, data, PlanBook(make=True), until=0.0)


@pytest.mark.parametrize(("name", "lam"), [("lambda-cgd-fresh", 0.8), ("blt", None)])
def test_a_run_that_time_cuts_off_goes_on_as_if_it_had_not(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lam: Any
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "1" * 2 * size)  # noise belongs to the run's id
    run, plans = replace(RUN, schedule="linear", method=name, lam=lam), PlanBook(make=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer._key(whole)
    parts.mkdir()
    shutil.copy(whole / "run.key", parts / "run.key")
    wanted = train(run, data, plans, unfinished=whole)
    for _ in range(3):
        with pytest.raises(TooLate):
            train(run, data, plans, until=0.0, unfinished=parts)
        (parts / "run.key").chmod(0o644)  # as copies have it
    found = train(run, data, plans, unfinished=parts)
    assert found["accuracy"] == wanted["accuracy"]
    assert found["seconds"] > 0
    assert not whole.exists()
    assert not parts.exists()
