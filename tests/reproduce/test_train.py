"""``python -m reproduce train``: settings, start, stop, resume, release; and what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import lambdacgd as lc
from lambdacgd.errors import CheckpointError, InvalidInput
from lambdacgd.training import checkpoint
from reproduce import session as sessions
from reproduce.__main__ import main, terminable
from reproduce.augment import Views
from reproduce.data import Examples, Splits
from reproduce.problems import TASKS
from reproduce.session import Interrupted, Session
from reproduce.train import train
from tests import fuzzing
from tests.faults import fault

RESULTS = Path(__file__).parents[2] / "results"


@given(data=st.data())
@settings(max_examples=fuzzing.EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_settings_file_gives_settings_or_a_sentence(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    sessions.write_config(sessions.resolve("digits", {"epsilon": 2.0, "data": "Köln", "lam": 0.5}), path)
    written = json.loads(path.read_text())
    odd = ([], {}, float("nan"), -1, True, "", 1e999, 9**400, None)
    edited = written | {data.draw(st.sampled_from(sorted(written))): data.draw(st.sampled_from(odd))}
    path.write_bytes(data.draw(fuzzing.files(path.read_bytes()) | st.just(json.dumps(edited).encode())))
    with contextlib.suppress(InvalidInput):
        sessions.read_config(path)


def test_written_settings_are_read_again(tmp_path):
    for epsilon in (2.0, float("inf")):
        resolved = sessions.resolve("digits", {"epsilon": epsilon, "data": "Köln/ζ"})
        sessions.write_config(resolved, tmp_path / "c.json")
        assert sessions.read_config(tmp_path / "c.json") == resolved


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
    key = tmp_path / "run.private" / "run.key"
    assert key.stat().st_mode & 0o777 == 0o600
    secret = key.read_bytes().splitlines()[1]
    assert not any(secret in path.read_bytes() for path in out.rglob("*") if path.is_file())
    card = json.loads((out / "release" / "privacy-card.json").read_text())
    assert card["claim"] == "(8, 0.0001)-differentially private"
    assert set(load_file(out / "release" / "model.safetensors")) == set(checkpoint.read(out / "checkpoint")["model"])
    again = sessions.read_config(out / "config.json")
    assert (again.task, again.epsilon, again.batch_size, again.lam) == ("digits", 8.0, 240, 0.5)
    assert lc.Plan.load(out / "plan.json").steps == 5


def test_a_finished_run_resumes_to_its_end(tmp_path):
    cli(*QUICK, "--out", tmp_path / "run")
    result = cli("--resume", tmp_path / "run")
    assert "5 of 5 steps taken" in result.output


def quick(folder, **changes):
    given = {"epsilon": 8.0, "epochs": 2, "batch_size": 240, "sampling": "cyclic", "lam": 0.5} | changes
    return Session.start(folder, sessions.resolve("digits", given))


BINNED = {"sampling": "balls-in-bins", "epsilon": float("inf")}  # without noise: no accountant is needed here


@fault(
    "Killed processes",
    "`python -m reproduce train` gets Ctrl-C or SIGTERM.",
    shows=("It saves a checkpoint after the step under way, says how to go on, and ends with exit code 130 or 143."),
    loses="Nothing.",
)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"optimizer": "adamw", "lr": 0.01, "ema": 0.9, "physical_batch_size": 100},
        BINNED | {"bins": "fixed"},
        BINNED | {"bins": "fresh"},
        {"schedule": "linear"},
    ],
    ids=["cyclic", "adamw", "fixed", "fresh", "linear"],
)
@pytest.mark.parametrize("sent", sessions.SIGNALS, ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_and_resume_ends_the_same(tmp_path, extra, sent):
    before = [signal.getsignal(number) for number in sessions.SIGNALS]
    first = quick(tmp_path / "a", **extra)
    first.private.save(first.folder / "checkpoint")
    first.private.detach()
    for end in ("", ".private"):
        shutil.copytree(tmp_path / f"a{end}", tmp_path / f"b{end}")

    def press(progress):
        if progress.step == 3:
            signal.raise_signal(sent)

    interrupted = Session.resume(tmp_path / "a", {})
    with pytest.raises(Interrupted) as stopped:
        interrupted.train(press, every_s=0.0)
    assert stopped.value.signal == sent
    assert 3 <= interrupted.private.steps_taken < 10
    interrupted.private.detach()
    rest, whole = Session.resume(tmp_path / "a", {}), Session.resume(tmp_path / "b", {})
    for session in (rest, whole):
        session.train(lambda progress: None)
    assert rest.private.finished
    for (name, one), (_, two) in zip(rest.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert rest.test_accuracy() == whole.test_accuracy()
    assert [signal.getsignal(number) for number in sessions.SIGNALS] == before


def start_and_end(folder):
    """Train in this process, and let go of the run as the end of a process does."""
    session = quick(folder, epochs=1)
    try:
        session.train(lambda progress: None)
    finally:
        session.private.detach()


class Killed(BaseException):
    """Nothing that a dying process would still do."""


@fault(
    "Killed processes",
    "`python -m reproduce train` is killed before its first checkpoint.",
    shows="Nothing: the same command, or `--resume` where there is a folder, begins the run.",
    loses="Nothing.",
)
@pytest.mark.parametrize("moment", ["write_config", "load_or_make", "Private", "save"])
def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch, moment):
    """With the folder where there is one, else as it was started. No noise was used: no weights left the process."""

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "save":
            patch.setattr("lambdacgd.training.checkpoint.save", die)
        elif moment == "Private":
            patch.setattr(sessions, "privatize", die)
        else:
            patch.setattr(sessions, moment, die)
        with pytest.raises(Killed):
            start_and_end(tmp_path / "run")
    folder = tmp_path / "run"
    assert folder.exists() == (moment in ("Private", "save"))
    again = Session.resume(folder, {}) if folder.exists() else quick(folder, epochs=1)
    again.train(lambda progress: None)
    assert again.private.finished
    assert not list(tmp_path.glob(".*"))


@fault(
    "Two jobs at once, and going back",
    "The checkpoint of `python -m reproduce train` is deleted, and the run resumed.",
    says="released step 5. Restore the checkpoint from a copy, or start a new run in another folder",
    loses="The run, unless there is a copy.",
)
def test_a_lost_checkpoint_is_not_begun_again(tmp_path, sentence):
    session = quick(tmp_path / "run", epochs=1)
    session.train(lambda progress: None)
    session.private.detach()
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(CheckpointError, match=sentence):
        Session.resume(tmp_path / "run", {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(InvalidInput, match=r"belongs to an earlier run, which released step 5"):
        quick(tmp_path / "run", epochs=1)


@fault(
    "Full disks",
    "The disk is full for the ledger of `python -m reproduce train`.",
    shows="One line that says so, and exit code 2.",
    loses="Nothing: `--resume` goes on from the newest checkpoint.",
)
def test_a_full_disk_for_the_ledger_is_one_line(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lambdacgd.ledger.os.fsync", full)
    assert main(["train", *QUICK, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_sigterm_ends_a_command_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(lambda: signal.raise_signal(signal.SIGTERM))
    assert terminable(typer.main.get_command(app), []) == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_bins_from_the_command_or_a_plan(tmp_path, bins):
    common = ["digits", "--epsilon", "inf", "--epochs", "1", "--batch-size", "240", "--lambda", "0.5"]
    cli(*common, "--bins", bins, "--out", tmp_path / "one")
    cli("digits", "--plan", tmp_path / "one" / "plan.json", "--out", tmp_path / "two")
    for run in ("one", "two"):
        assert sessions.read_config(tmp_path / run / "config.json").bins == bins
        assert lc.Plan.load(tmp_path / run / "plan.json").sampling.bins == bins
    with pytest.raises(InvalidInput, match="fixed by --plan"):
        cli("digits", "--plan", tmp_path / "one" / "plan.json", "--bins", bins, "--out", tmp_path / "four")
    with pytest.raises(InvalidInput, match="fixed for a run"):
        cli("--resume", tmp_path / "one", "--bins", bins)
    with pytest.raises(InvalidInput, match=r"^bins is 'old'"):
        cli(*common, "--bins", "old", "--out", tmp_path / "five")


def test_bins_are_written_down_where_they_are_a_default(tmp_path):
    session = quick(tmp_path / "run", **BINNED)
    assert sessions.read_config(tmp_path / "run" / "config.json").bins == session.plan.sampling.bins
    assert quick(tmp_path / "cyclic").config.bins is None


def test_views_schedule_and_normalised_noise_from_the_command(tmp_path, monkeypatch):
    def photographs(folder):
        part = Examples(torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8), torch.arange(96) % 10, scale=1 / 127.5)
        return Splits(part, part, 10)

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))

    monkeypatch.setitem(TASKS, "cifar10", replace(TASKS["cifar10"], load=photographs, model=model))
    rates, seen = [], []
    step, look = torch.optim.SGD.step, Views.__call__
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a: (rates.append(self.param_groups[0]["lr"]), step(self, *a))[1]
    )

    def watch(self, images, examples):
        seen.append((int(self.step), examples.tolist()))
        return look(self, images, examples)

    monkeypatch.setattr(Views, "__call__", watch)
    how = ["--views", "2", "--schedule", "linear", "--normalized", "--ema", "0.9", "--lambda", "0.5", "--lr", "1"]
    result = cli("cifar10", "--epsilon", "inf", "--epochs", "2", "--batch-size", "32", *how, "--out", tmp_path / "run")
    assert result.exit_code == 0
    plan = lc.Plan.load(tmp_path / "run" / "plan.json")
    assert plan.mechanism == lc.LambdaCGD(0.5, normalized=True)
    assert rates == pytest.approx([0.05 + 0.95 * (1 - t / 6) for t in range(6)])
    assert [number for number, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert all(examples[::2] == examples[1::2] for _, examples in seen)
    assert all(sorted(e for _, part in seen[i : i + 3] for e in part[::2]) == list(range(96)) for i in (0, 3))


def test_the_command_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_):
        raise Interrupted

    monkeypatch.setattr(sessions.Session, "train", interrupted)
    result = cli(*QUICK, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert "--resume" in result.output


def test_a_plan_file(tmp_path):
    p = lc.plan(1437, 240, epochs=1, epsilon=3.0, delta=1e-4, mechanism=lc.BISR(2), sampling=lc.Cyclic())
    p.save(tmp_path / "plan.json")
    cli("digits", "--plan", tmp_path / "plan.json", "--clip", "0.5", "--out", tmp_path / "run")
    assert lc.Plan.load(tmp_path / "run" / "plan.json") == p
    resolved = sessions.read_config(tmp_path / "run" / "config.json")
    assert (resolved.clip, resolved.mechanism, resolved.epsilon) == (0.5, "bisr", 3.0)


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
        (["digits", "--epsilon", "1", "--schedule", "cosine"], "schedule"),
        (["digits", "--epsilon", "1", "--views", "4"], "views"),
        (["digits", "--epsilon", "1", "--mechanism", "dp-sgd", "--sampling", "poisson", "--normalized"], "normalized"),
        (["digits", "--epsilon", "1", "--device", "tpu9"], "device"),
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
