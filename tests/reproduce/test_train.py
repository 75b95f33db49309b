"""``python -m reproduce train``: settings, start, stop, resume, release; and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

import lambdacgd as lc
from lambdacgd.errors import InvalidInput
from lambdacgd.training import checkpoint
from reproduce import session as sessions
from reproduce.problems import TASKS
from reproduce.session import Interrupted, Session
from reproduce.train import train

RESULTS = Path(__file__).parents[2] / "results"


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "c.toml").write_text('data = "Köln"\n', encoding="utf-8-sig")
    assert sessions.read_config(tmp_path / "c.toml") == {"data": "Köln"}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_refused(tmp_path, encoding):
    (tmp_path / "c.toml").write_text('data = "Köln"\n', encoding=encoding)
    with pytest.raises(InvalidInput, match=r"c\.toml.*UTF-8"):
        sessions.read_config(tmp_path / "c.toml")


def test_written_settings_are_read_again(tmp_path):
    resolved = sessions.resolve("digits", None, {"epsilon": 2.0, "data": "Köln/ζ"})
    sessions.write_config(resolved, tmp_path / "c.toml")
    assert sessions.resolve(None, tmp_path / "c.toml", {}) == resolved


def test_the_defaults_of_digits_are_those_that_did_best():
    best = json.loads((RESULTS / "demo_tuning.json").read_text())["best"]["lambda-cgd-fresh"]
    task = TASKS["digits"]
    assert (task.learning_rate, task.max_grad_norm) == (best["learning_rate"], best["max_grad_norm"])


QUICK = ["digits", "--epsilon", "8", "--epochs", "1", "--batch-size", "240", "--sampling", "cyclic", "--lambda", "0.5"]


def cli(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(train)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_whole_run(tmp_path):
    out = tmp_path / "run"
    result = cli(*QUICK, "--out", out)
    assert result.exit_code == 0
    assert "test accuracy" in result.output
    assert (out / "private" / "run.key").stat().st_mode & 0o777 == 0o600
    card = json.loads((out / "release" / "privacy-card.json").read_text())
    assert card["claim"] == "(8, 0.0001)-differentially private"
    assert set(load_file(out / "release" / "model.safetensors")) == set(checkpoint.read(out / "checkpoint")["model"])
    report = (out / "report.md").read_text()
    assert "\\" not in report
    assert "Test accuracy" in report
    assert "λ" in report or "lam = 0.5" in report
    assert "loss" not in report.replace("training loss, per-example norms", "")
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    again = sessions.resolve(None, out / "config.toml", {})
    assert (again.task, again.epsilon, again.batch_size, again.lam) == ("digits", 8.0, 240, 0.5)
    assert lc.Plan.load(out / "plan.json").steps == 5


def test_operator_logs_say_what_they_are(tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    cli(*QUICK, "--out", out)
    assert (out / "operator" / "NOT-PRIVATE.txt").read_text().startswith("NOT PRIVATE")
    assert list((out / "operator").glob("events.*"))


def test_a_finished_run_resumes_to_its_end(tmp_path):
    cli(*QUICK, "--out", tmp_path / "run")
    result = cli("--resume", tmp_path / "run")
    assert "5 of 5 steps taken" in result.output


def quick(folder, **changes):
    given = {"epsilon": 8.0, "epochs": 2, "batch_size": 240, "sampling": "cyclic", "lam": 0.5} | changes
    return Session.start(folder, sessions.resolve("digits", None, given))


BINNED = {"sampling": "balls-in-bins", "epsilon": float("inf")}  # without noise: no accountant is needed here


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"optimizer": "adamw", "lr": 0.01, "ema": 0.9, "physical_batch_size": 100},
        BINNED | {"bins": "fixed"},
        BINNED | {"bins": "fresh"},
    ],
    ids=["cyclic", "adamw", "fixed", "fresh"],
)
def test_ctrl_c_saves_and_resume_ends_the_same(tmp_path, extra):
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a shell
    first = quick(tmp_path / "a", **extra)
    first.private.save(first.folder / "checkpoint")
    first.private.detach()
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def press(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    interrupted = Session.resume(tmp_path / "a", {})
    with pytest.raises(Interrupted):
        interrupted.train(press, every_s=0.0)
    assert 3 <= interrupted.private.steps_taken < 10
    interrupted.private.detach()
    rest, whole = Session.resume(tmp_path / "a", {}), Session.resume(tmp_path / "b", {})
    for session in (rest, whole):
        session.train(lambda progress: None)
    assert rest.private.finished
    for (name, one), (_, two) in zip(rest.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert rest.test_accuracy() == whole.test_accuracy()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_bins_from_the_command_or_a_file(tmp_path, bins):
    common = ["digits", "--epsilon", "inf", "--epochs", "1", "--batch-size", "240", "--lambda", "0.5"]
    cli(*common, "--bins", bins, "--out", tmp_path / "one")
    assert sessions.resolve(None, tmp_path / "one" / "config.toml", {}).bins == bins
    cli(*common, "--config", tmp_path / "one" / "config.toml", "--out", tmp_path / "two")
    for run in ("one", "two"):
        assert lc.Plan.load(tmp_path / run / "plan.json").sampling.bins == bins
    cli("digits", "--plan", tmp_path / "one" / "plan.json", "--out", tmp_path / "three")
    assert sessions.resolve(None, tmp_path / "three" / "config.toml", {}).bins == bins
    with pytest.raises(InvalidInput, match="fixed by --plan"):
        cli("digits", "--plan", tmp_path / "one" / "plan.json", "--bins", bins, "--out", tmp_path / "four")
    with pytest.raises(InvalidInput, match="fixed for a run"):
        cli("--resume", tmp_path / "one", "--bins", bins)
    with pytest.raises(InvalidInput, match=r"^bins is 'old'"):
        cli(*common, "--bins", "old", "--out", tmp_path / "five")


def test_bins_are_written_down_where_they_are_a_default(tmp_path):
    session = quick(tmp_path / "run", **BINNED)
    assert sessions.resolve(None, tmp_path / "run" / "config.toml", {}).bins == session.plan.sampling.bins
    assert quick(tmp_path / "cyclic").config.bins is None


def test_the_command_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_):
        raise Interrupted

    monkeypatch.setattr(sessions.Session, "train", interrupted)
    result = cli(*QUICK, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert "--resume" in result.output


def test_a_plan_file_and_a_config_file(tmp_path):
    p = lc.plan(1437, 240, epochs=1, epsilon=3.0, delta=1e-4, mechanism=lc.BISR(2), sampling=lc.Cyclic())
    p.save(tmp_path / "plan.json")
    (tmp_path / "c.toml").write_text('lr = 0.25\nclip = 2\ndevice = "cpu"\n')
    cli(
        "digits",
        "--plan",
        tmp_path / "plan.json",
        "--config",
        tmp_path / "c.toml",
        "--clip",
        "0.5",
        "--out",
        tmp_path / "run",
    )
    assert lc.Plan.load(tmp_path / "run" / "plan.json") == p
    resolved = sessions.resolve(None, tmp_path / "run" / "config.toml", {})
    assert (resolved.lr, resolved.clip, resolved.mechanism, resolved.epsilon) == (0.25, 0.5, "bisr", 3.0)


def test_infinite_epsilon_is_loud(tmp_path):
    result = cli(*QUICK[:1], "--epsilon", "inf", *QUICK[3:], "--out", tmp_path / "run")
    assert "NOT PRIVATE" in result.output
    assert json.loads((tmp_path / "run" / "release" / "privacy-card.json").read_text())["claim"].startswith("none")


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (["mnist", "--epsilon", "1"], "task"),
        (["digits"], "epsilon"),
        (["digits", "--epsilon", "0"], "epsilon"),
        (["digits", "--epsilon", "1", "--lambda", "high"], "lam"),
        (["digits", "--epsilon", "1", "--lr", "-1"], "lr"),
        (["digits", "--epsilon", "1", "--clip", "0"], "clip"),
        (["digits", "--epsilon", "1", "--optimizer", "lbfgs"], "optimizer"),
        (["digits", "--epsilon", "1", "--device", "tpu9"], "device"),
        (["digits", "--epsilon", "1", "--config", "/nowhere.toml"], "config"),
        (["digits", "--plan", "/nowhere.json"], "plan"),
        (["cifar10", "--epsilon", "1", "--data", "/nowhere"], "data"),
        (["--resume", "/nowhere"], "resume"),
        (["digits", "--resume", "/nowhere"], "task"),
        (["--resume", "/nowhere", "--lr", "1"], "lr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input(arguments, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for library in ("torchvision", "torchvision.datasets"):
        monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(InvalidInput) as caught:
        cli(*arguments)
    assert caught.value.parameter == parameter


def test_clashes(tmp_path):
    (tmp_path / "c.toml").write_text("learning_rate = 1\n")
    with pytest.raises(InvalidInput, match="learning_rate"):
        cli(*QUICK, "--config", tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("lr = = 1\n")
    with pytest.raises(InvalidInput, match="TOML"):
        cli(*QUICK, "--config", tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text('data = "Köln"\n', encoding="latin-1")
    with pytest.raises(InvalidInput, match=r"c\.toml.*UTF-8"):
        cli(*QUICK, "--config", tmp_path / "c.toml")
    with pytest.raises(InvalidInput, match="a file that can be read"):
        cli(*QUICK, "--config", tmp_path)
    for line in ("task = [1]", "data = 3"):
        (tmp_path / "c.toml").write_text(f"epsilon = 8\n{line}\n")
        with pytest.raises(InvalidInput):
            cli("--config", tmp_path / "c.toml", "--out", tmp_path / "new")
    with pytest.raises(InvalidInput, match="fixed by --plan"):
        cli("digits", "--plan", "p.json", "--epsilon", "1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(InvalidInput, match="not empty"):
        cli(*QUICK, "--out", tmp_path / "full")
    p = lc.plan(1000, 240, epochs=1, epsilon=3.0, delta=1e-4, mechanism=lc.BISR(2), sampling=lc.Cyclic())
    p.save(tmp_path / "plan.json")
    with pytest.raises(InvalidInput, match="plan is for 1000"):
        cli("digits", "--plan", tmp_path / "plan.json", "--out", tmp_path / "other")
