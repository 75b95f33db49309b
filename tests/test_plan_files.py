"""Plan files: what is written is read back the same, and what was changed since is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import lambdacgd as lc
from lambdacgd.planning import _digest
from tests.faults import fault
from tests.test_planning import PAPER, cyclic

KEYS = {
    "mechanism", "sampling", "epsilon", "delta", "steps", "steps_per_epoch", "epochs", "batch_size", "examples",
    "sensitivity", "sigma", "rmse", "maxse", "certificate",
}  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [
        {"mechanism": lc.LambdaCGD(0.9, normalized=True)},
        {"mechanism": lc.LambdaCGD(objective="maxse")},
        {"mechanism": lc.GammaBIFR(objective="rmse")},
        {"mechanism": lc.BISR(16)},
        {"mechanism": lc.BandInvMF(3)},
        {"mechanism": lc.BandInvMF(3, normalized=True)},
        {"mechanism": lc.BLT(2)},
        {"mechanism": lc.BandMF()},
        {"mechanism": lc.Diagonal()},
        {"mechanism": lc.BSR(5, momentum=0.9)},
        {"mechanism": lc.LambdaCGD(0.5), "epsilon": math.inf},
    ],
)
def test_file_round_trip(request_, tmp_path):
    plan = cyclic(examples=2000, batch_size=100, epochs=3, **request_)
    plan.save(tmp_path / "plan.json")
    assert lc.Plan.load(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert set(data) >= KEYS
    assert data["mechanism"]["name"] == plan.mechanism.name
    assert {"method", "direction", "confidence"} <= set(data["certificate"])


def test_plans_of_the_first_format_still_load():
    """Made by the release before: what it called batch_size is what was asked for, and 300 of 2000 draw 333.3."""
    text = (Path(__file__).parent / "golden" / "plans-format-1.jsonl").read_text().splitlines()
    assert len(text) == 9
    for line in text:
        written = json.loads(line)
        plan = lc.Plan.from_json(line)
        plan.check()
        assert plan.mechanism.to_dict() == written["mechanism"]
        assert plan.sampling.to_dict() == written["sampling"]
        assert (plan.sigma, plan.rmse, plan.selection) == (written["sigma"], written["rmse"], written["choice"])
        assert plan.requested_batch_size == written["batch_size"] == 300
        assert plan.batch_size == (300 if plan.sampling.name == "cyclic" else 2000 / 6)
        assert lc.Plan.from_json(plan.to_json()) == plan
        with pytest.raises(lc.InvalidInput, match="changed after it was made"):
            lc.Plan.from_json(json.dumps(written | {"sigma": 0.1}))


@fault(
    "Files that were changed or planted",
    "σ, N or δ is edited in a plan file.",
    says="The plan file was changed after it was made: its digest differs. Make a new plan instead.",
    loses="Nothing: the plan can be made anew. `lambdacgd verify` finds a σ that was edited together with the digest.",
)
def test_an_edited_plan_is_refused(tmp_path, sentence):
    """Contract 1: nobody trains with a σ computed for something else."""
    path = tmp_path / "plan.json"
    for key, value in {"sigma": 0.1, "examples": 10, "delta": 0.5}.items():
        cyclic(lc.LambdaCGD(0.9)).save(path)
        data = json.loads(path.read_text())
        data[key] = value
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=sentence):
            lc.Plan.load(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"{}", "not a plan file"), (b"[]", "not a plan file"), (b"not json", "JSON plan file"),
     (b"\xff\xfe{}", "byte 0 is not UTF-8"),
     (b"[" * 200_000, "JSON plan file"), (b"9" * 5000, "JSON plan file")],
    ids=["empty", "list", "text", "bytes", "deep", "digits"],
)  # fmt: skip
def test_a_file_that_is_not_a_plan_is_refused_in_a_sentence(content, told, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(lc.InvalidInput, match=told):
        lc.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("number", [int, np.float32, np.float64, Fraction], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sampling", [lc.Cyclic(), lc.BallsInBins()], ids=lambda sampling: sampling.name)
def test_a_plan_is_its_file_whatever_numbers_it_was_asked_with(number, sampling):
    small = {"examples": np.int32(400), "batch_size": np.int64(100), "epochs": np.int64(2), "delta": np.float32(1e-4)}
    plan = lc.plan(**small, epsilon=number(4), mechanism=lc.LambdaCGD(number(0)), sampling=sampling)
    assert plan == lc.Plan.from_json(plan.to_json())
    assert plan.digest == lc.Plan.from_json(plan.to_json()).digest


@pytest.mark.parametrize(
    "mechanism",
    [
        lc.LambdaCGD(np.float32(0.5)),
        lc.BISR(np.int64(2), momentum=np.float32(0.9), decay=1),
        lc.GammaBIFR(np.int64(2), np.float32(0.25)),
        lc.BandInvMF(np.int64(2), np.array([1.0, -0.5])),
        lc.BandMF(2, [1, 0.5]),
        lc.BLT(np.int64(1), [0.5], np.array([0.25])),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_mechanisms_of_numpy_numbers_are_plain_ones(mechanism):
    plan = cyclic(mechanism=mechanism)
    again = lc.Plan.from_json(plan.to_json())
    assert (again, again.digest) == (plan, plan.digest)


def test_a_plan_of_an_earlier_release_is_still_that_plan():
    plan = replace(cyclic(lc.LambdaCGD(0.95)), version="0.0.9")
    assert plan.digest != cyclic(lc.LambdaCGD(0.95)).digest
    again = lc.Plan.from_json(plan.to_json())
    assert (again, again.digest) == (plan, plan.digest)


@pytest.mark.parametrize(
    "changes",
    [
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"sigma": "much"},
        {"batch_size": 10**9},
        {"requested_batch_size": 10**9},
        {"epsilon": 0.1},
        {"delta": 1e-9},
        {"certificate": None},
        {"certificate": {"method": "analytic"}},
        {"mechanism": {"name": "lambda-cgd"}},
        {"mechanism": "lambda-cgd"},
        {"sampling": {"name": "cyclic"}},
        {"steps": 7},
    ],
    ids=str,
)
def test_a_file_that_is_no_plan_is_refused_even_with_a_digest_of_its_own(changes):
    content = cyclic(lc.LambdaCGD(0.95)).to_dict() | changes
    content.pop("digest")
    with pytest.raises(lc.InvalidInput):
        lc.Plan.from_json(json.dumps(content | {"digest": _digest(content)}))
    for key in content:
        part = {
            name: value for name, value in cyclic(lc.LambdaCGD(0.95)).to_dict().items() if name not in (key, "digest")
        }
        with pytest.raises(lc.InvalidInput):
            lc.Plan.from_json(json.dumps(part | {"digest": _digest(part)}))


def test_a_file_without_bins_means_fixed_ones(tmp_path):
    """Files made before there was a choice; the digest is that of what was written."""
    content = lc.plan(**PAPER, mechanism=lc.LambdaCGD(0.9), sampling=lc.BallsInBins("fixed")).to_dict()
    content.pop("digest")
    assert content["sampling"].pop("bins") == "fixed"
    assert content["certificate"]["details"].pop("sampling") == "balls-in-bins, fixed bins"
    old = lc.Plan.from_json(json.dumps(content | {"digest": _digest(content)}))
    assert old.sampling.bins == "fixed"
    old.check()


@pytest.mark.parametrize("sampling", ["balls-in-bins", "cyclic", "poisson"])
def test_noise_of_fresh_bins_is_refused_elsewhere_even_where_the_file_forgets_the_kind(sampling):
    """DP-SGD's sensitivity and errors are the same with any bins: the certificate's method still tells."""
    content = lc.plan(40, 10, epochs=3, epsilon=4.0, delta=1e-3, mechanism=lc.Identity()).to_dict()
    content.pop("digest")
    content["certificate"]["details"].pop("sampling")
    content["sampling"] = {"name": sampling, "examples": 40, "steps_per_epoch": 4, "epochs": 3}
    content["sampling"] |= {"batch_size": 10} if sampling == "cyclic" else {}
    with pytest.raises(lc.InvalidInput, match="do not belong together"):
        lc.Plan.from_json(json.dumps(content | {"digest": _digest(content)}))


@pytest.mark.parametrize("value", [None, "x", -1, [], math.inf, True], ids=repr)
@pytest.mark.parametrize("field", ["kind", "direction", "confidence", "details", "rmse", "maxse", "sensitivity"])
def test_a_file_that_hashes_right_and_says_nonsense_is_refused(field, value):
    data = json.loads(cyclic(lc.LambdaCGD(0.9)).to_json())
    del data["digest"]
    (data if field in data else data["certificate"])[field] = value
    with pytest.raises(lc.InvalidInput):
        lc.Plan.from_json(json.dumps(data | {"digest": _digest(data)})).check()


def test_what_an_earlier_release_sampled_is_still_said():
    """Today every certificate is proven; a file of an earlier release loads, and does not look like one."""
    content = lc.plan(**PAPER, mechanism=lc.LambdaCGD(0.9), sampling=lc.BallsInBins("fixed")).to_dict()
    content.pop("digest")
    content["certificate"] |= {"method": "monte-carlo", "confidence": 1 - 1e-9}
    plan = lc.Plan.from_json(json.dumps(content | {"digest": _digest(content)}))
    assert "fails with probability 1e-09" in str(plan)


def test_what_an_earlier_release_estimated_is_refused():
    content = cyclic(lc.LambdaCGD(0.9)).to_dict()
    content.pop("digest")
    content["certificate"] |= {"kind": "estimate", "confidence": 0.0}
    with pytest.raises(lc.InvalidInput, match="make the plan again"):
        lc.Plan.from_json(json.dumps(content | {"digest": _digest(content)}))


def test_a_certificate_that_does_not_say_what_it_is_is_refused():
    data = json.loads(cyclic(lc.LambdaCGD(0.9)).to_json())
    del data["digest"], data["certificate"]["kind"]
    with pytest.raises(ValueError, match="not a whole plan"):
        lc.Plan.from_json(json.dumps(data | {"digest": _digest(data)}))
