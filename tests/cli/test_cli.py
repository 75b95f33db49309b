"""The command line as a person uses it: tables, JSON, files, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import lambdacgd as lc
from lambdacgd.cli import main, planner

BASE = ["--examples", "50000", "--batch-size", "128", "--epochs", "10", "--epsilon", "8", "--delta", "1e-5"]
CYCLIC = [*BASE, "--sampling", "cyclic"]


def test_plan_as_json_is_the_plan_file(capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert main(["plan", *CYCLIC, "--lambda", "0.9", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["rmse"] == pytest.approx(19.714, rel=1e-3)
    assert printed["mechanism"] == {"name": "lambda-cgd", "lam": 0.9, "normalized": False}
    assert printed["sampling"]["name"] == "cyclic"


def test_plan_from_a_noise_multiplier(capsys):
    asked = [a for a in CYCLIC if a not in ("--epsilon", "8")]
    assert main(["plan", *asked, "--noise-multiplier", "6", "--lambda", "0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sigma"] == 6.0
    assert found["epsilon"] == pytest.approx(5.46186, rel=2e-3)  # with what is set aside for floating point
    assert found["epsilon"] > 5.46186
    assert main(["plan", *asked]) == 2
    assert "--epsilon: Give either --epsilon or --noise-multiplier" in capsys.readouterr().err


def test_plan_for_people(capsys):
    assert main(["plan", *CYCLIC]) == 0
    text = capsys.readouterr().out
    assert "relative to the clipping norm" in text
    assert "stores none, regenerates 1" in text
    assert "was chosen by rmse" in text
    assert "quick estimates" in text
    assert max(map(len, text.splitlines())) <= 80


def test_where_the_exact_accountant_does_not_answer_it_is_said(capsys):
    small = ["--examples", "100", "--batch-size", "20", "--epochs", "2", "--epsilon", "25", "--delta", "1e-3"]
    assert main(["plan", *small, "--lambda", "0.9", "--bins", "fixed"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The exact accountant refuses, so this σ has no amplification: ε is" in said


def test_bands_are_chosen_for_poisson_sampling_and_lambda_for_a_schedule(capsys):
    small = ["--examples", "200", "--batch-size", "25", "--epochs", "2", "--epsilon", "4", "--delta", "1e-3", "--json"]
    assert main(["plan", *small, "--mechanism", "bandmf", "--bands", "auto", "--sampling", "poisson"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["mechanism"]["bands"] == plan["sampling"]["groups"] in (2, 4, 8)
    assert main(["plan", *small, "--sampling", "cyclic", "--schedule", "linear", "--warmup", "0.1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["workload"]["schedule"], plan["workload"]["warmup"]) == ("linear", 0.1)
    assert main(["plan", *small, "--mechanism", "bisr", "--bands", "auto"]) == 2
    assert "--bands is 'auto'" in capsys.readouterr().err
    assert main(["plan", *small, "--schedule", "step"]) == 2
    assert "--schedule is 'step'" in capsys.readouterr().err


def test_infinite_epsilon_is_loud(capsys):
    assert main(["plan", *CYCLIC, "--epsilon", "inf", "--lambda", "0.9"]) == 0
    assert "nothing is private" in capsys.readouterr().out


def test_a_large_delta_is_remarked_on(capsys):
    for as_json in ([], ["--json"]):
        assert main(["plan", *CYCLIC, "--delta", "0.001", "--lambda", "0.9", *as_json]) == 0
        assert "above 1/N" in capsys.readouterr().err


def test_compare_lists_every_mechanism(capsys):
    small = ["--examples", "1000", "--batch-size", "50", "--epochs", "2", "--epsilon", "2", "--delta", "1e-5"]
    assert main(["compare", *small, "--sampling", "cyclic"]) == 0
    text = capsys.readouterr().out
    for name in ("DP-SGD", "λCGD", "normalised", "γ-BIFR", "BISR", "BandInvMF", "BLT", "BSR", "BandMF"):
        assert name in text
    assert main(["compare", *small, "--sampling", "cyclic", "--bands", "3", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["mechanism"]["name"] for plan in plans][:3] == ["dp-sgd", "lambda-cgd", "lambda-cgd"]
    assert {plan["mechanism"]["bands"] for plan in plans if "bands" in plan["mechanism"]} == {3}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["plan", *CYCLIC, "--epsilon", "-1"], "--epsilon"),
        (["plan", *CYCLIC, "--epsilon", "nan"], "--epsilon"),
        (["plan", *CYCLIC, "--epsilon", "lots"], "--epsilon"),
        (["plan", *CYCLIC, "--delta", "1"], "--delta"),
        (["plan", *CYCLIC, "--lambda", "1"], "--lambda"),
        (["plan", *CYCLIC, "--lambda", "big"], "--lambda"),
        (["plan", *CYCLIC, "--bands", "4"], "--bands"),
        (["plan", *CYCLIC, "--mechanism", "bisr", "--bands", "5000"], "--bands"),
        (["plan", *CYCLIC, "--mechanism", "dp-sgd", "--gamma", ".5"], "--gamma"),
        (["plan", *CYCLIC, "--mechanism", "magic"], "--mechanism"),
        (["plan", *CYCLIC, "--batch-size", "60000"], "--batch-size"),
        (["plan", *CYCLIC, "--batch-size", "12.5"], "--batch-size"),
        (["plan", *BASE, "--sampling", "poisson"], "--sampling"),
        (["plan", "--examples", "5"], "--batch-size"),
        (["plan", *CYCLIC, "--nonsense"], "--nonsense"),
        (["compare", *CYCLIC, "--epochs", "0"], "--epochs"),
        (["frobnicate"], "frobnicate"),
        (["plan", *CYCLIC, "--lambda", ".5", "--out", "/proc/nowhere/plan.json"], "/proc/nowhere/plan.json"),
        (["plan", *CYCLIC, "--lambda", ".5", "--out", "/"], "/"),
        (["plan", *CYCLIC, "--examples", "1" + 30 * "0", "--mechanism", "bisr"], "--epochs"),
        (["plan", *BASE, "--epsilon", "500"], "--epsilon"),
        (["plan", *BASE, "--out", "/proc/nowhere/plan.json"], "there is no folder /proc/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, flag, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("lambdacgd: ")
    assert flag in captured.err


def test_help_waits_for_nothing_heavy():
    """What makes --help instant: the command tree needs neither NumPy, SciPy nor torch."""
    check = "import sys, lambdacgd.cli.app as a; a.command(); assert not {'numpy', 'scipy', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flags_follow_from_the_fields_of_mechanisms_and_samplings():
    """A field with a help text is a flag, and what the flag says reaches the field."""
    from lambdacgd.cli.options import flag_of, parameters_of, plan_arguments, plan_flags
    from lambdacgd.mechanisms import MECHANISMS
    from lambdacgd.sampling import SAMPLINGS

    described = parameters_of([*MECHANISMS.values(), *SAMPLINGS.values()])
    assert set(described) == {"lam", "normalized", "bands", "buffers", "gamma", "amplified", "objective", "bins"}
    assert set(plan_flags()) == {"mechanism", "sampling", "schedule", "warmup", "final_rate", *described}
    assert flag_of("lam") == "--lambda"
    for given, mechanism in [
        ({"lam": "0.5", "normalized": True}, lc.LambdaCGD(0.5, normalized=True)),
        ({"objective": "maxse", "lam": "auto"}, lc.LambdaCGD(objective="maxse")),
        ({"mechanism": "gamma-bifr", "bands": 3, "gamma": ".25"}, lc.GammaBIFR(3, 0.25)),
        ({"mechanism": "bandinvmf", "amplified": True}, lc.BandInvMF(amplified=True)),
        ({"mechanism": "blt", "buffers": 2, "bands": None}, lc.BLT(2)),
    ]:
        assert plan_arguments(given) == {"mechanism": mechanism}
    assert plan_arguments({"bins": "fixed"})["sampling"] == lc.BallsInBins("fixed")
    assert plan_arguments({"sampling": "cyclic"})["sampling"] == lc.Cyclic()


FACTORIES = """
import torch
from torch import nn
from torch.nn import functional as F

def make(model=None):
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    return model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

def mixing():
    return make(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

def model():
    return nn.Linear(3, 2)

def train(model, data):
    return make(model)
"""


def test_a_model_of_ones_own_is_checked(capsys, tmp_path, monkeypatch):
    (tmp_path / "factories_of_mine.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "factories_of_mine:make"]) == 0
    assert "Linear can be trained privately" in capsys.readouterr().out
    for factory, told in {
        "factories_of_mine:mixing": "BatchNorm",
        "factories_of_mine:model": "lambdacgd: factories_of_mine:model must return a model",
        "factories_of_mine:train": "train is called without arguments: missing a required argument: 'model'",
        "factories_of_mine:nothing": "has no function nothing",
        "factories_of_nobody:make": "there is no module factories_of_nobody",
        "factories_of_mine": "it must be module:function",
    }.items():
        assert main(["check", factory]) == 2
        told_by_it = capsys.readouterr().err
        assert told_by_it.count("\n") == 1
        assert told in told_by_it
    assert main(["check", "factories_of_mine:make", "--loss-reduction", "median"]) == 2
    assert "--loss-reduction" in capsys.readouterr().err


def test_help_and_version(capsys):
    assert main(["plan", "--help"]) == 0
    assert {"--batch-size", "--lambda", "--bins"} <= set(capsys.readouterr().out.split())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2


def test_compare_over_a_single_step(capsys):
    one = ["--examples", "10", "--batch-size", "10", "--epochs", "1", "--epsilon", "4", "--delta", "1e-5"]
    assert main(["compare", *one, "--sampling", "cyclic", "--json"]) == 0
    assert {plan["steps"] for plan in json.loads(capsys.readouterr().out)} == {1}


def test_compare_needs_noise(capsys):
    one = ["--examples", "10", "--batch-size", "10", "--epochs", "1", "--epsilon", "inf", "--delta", "1e-5"]
    assert main(["compare", *one]) == 2
    assert "--epsilon: Without noise all mechanisms are the same" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_bins_belong_to_balls_in_bins(command, capsys):
    assert main([command, *CYCLIC, "--bins", "fixed"]) == 2
    assert "--bins is 'fixed'; it applies to balls-in-bins" in capsys.readouterr().err
    assert main([command, *BASE, "--bins", "old"]) == 2
    assert "--bins is 'old'; it must be fresh" in capsys.readouterr().err


def test_what_is_compared():
    from lambdacgd.questions import _rows as compared

    for sampling in (lc.BallsInBins("fixed"), lc.BallsInBins("fresh")):
        rows = compared(sampling, bands=4, buffers=3)
        assert rows[:2] == [(lc.Identity(), lc.Poisson()), (lc.BandMF("auto"), lc.Poisson())]
        assert {drawn for _, drawn in rows[2:]} == {sampling}
    assert compared(lc.Poisson(8), bands=4, buffers=3)[1] == (lc.BandMF("auto"), lc.Poisson(8))
    assert {drawn for _, drawn in compared(lc.Cyclic(), bands=4, buffers=3)} == {lc.Cyclic()}
    both = {drawn for _, drawn in compared(None, bands=4, buffers=3)}
    assert both == {lc.Poisson(), lc.BallsInBins("fresh"), lc.BallsInBins("fixed")}


@pytest.mark.parametrize(
    ("package", "advice"), [("matplotlib", "pip install '.[reproduce]'"), ("scipy", "all it depends on")]
)
def test_a_missing_package_is_one_line(package, advice, capsys, monkeypatch):
    from lambdacgd.cli import planner

    def show(*_, **__):
        raise ModuleNotFoundError(f"No module named '{package}.parts'", name=f"{package}.parts")

    monkeypatch.setattr(planner, "show_plan", show)
    assert main(["plan", *CYCLIC]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"lambdacgd: {package}.parts is not installed here")
    assert advice in told


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "lambdacgd", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert lc.__version__ in done.stdout


@pytest.mark.parametrize(("given", "used"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_the_command_works_with_one_thread_unless_told_otherwise(given, used):
    """NumPy is not loaded yet when that is decided."""
    program = """
import os, sys
from lambdacgd import cli
cli.main = lambda: print('numpy' in sys.modules, os.environ['OMP_NUM_THREADS'])
cli.entry()
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | given
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False", used]


def test_one_step_is_one_step(capsys):
    run = ["--examples", "2000", "--batch-size", "1100", "--epochs", "2", "--epsilon", "2", "--delta", "1e-5"]
    assert main(["plan", *run, "--lambda", "0.1"]) == 0
    assert "2000, about 2000 (1100 asked for) a step" in capsys.readouterr().out


def test_complaints_name_flags(capsys):
    run = ["--examples", "1000", "--batch-size", "20", "--epochs", "1", "--noise-multiplier", "1", "--delta", "1e-5"]
    assert main(["plan", *run]) == 2
    said = capsys.readouterr().err
    assert "An automatic λ" in said
    assert "--noise-multiplier" in said
    assert "noise_multiplier" not in said


def test_the_comparison_says_whose_columns_were_certified():
    def certified_by(mechanism, **sampling):
        return planner._method(lc.plan(40, 10, epochs=2, epsilon=2.0, delta=1e-3, mechanism=mechanism, **sampling))

    assert [certified_by(m) for m in (lc.LambdaCGD(0.5), lc.BISR(3))] == ["exact", "dominated"]
    assert certified_by(lc.BISR(3), sampling=lc.Cyclic()) == "analytic"
