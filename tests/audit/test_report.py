"""lc.audit on correct code: every kind of plan passes, a user's own loop is what runs, and the report says it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import lambdacgd as lc
from lambdacgd import cli
from lambdacgd.auditing.canaries import plain_loop

pytestmark = pytest.mark.filterwarnings("ignore:δ = ", "ignore:NOT CERTIFIED")

PLANS: list[tuple[lc.Mechanism, lc.Sampling]] = [
    (lc.LambdaCGD(0.8, normalized=True), lc.BallsInBins("fixed")),
    (lc.BISR(3), lc.BallsInBins("fixed")),
    (lc.BLT(2), lc.Cyclic()),
    (lc.BandMF(2), lc.BallsInBins("fresh")),
    (lc.Identity(), lc.Poisson()),
    (lc.BandMF(2), lc.Poisson()),
    (lc.Identity(), lc.BallsInBins("fresh")),
    (lc.BSR(2), lc.Cyclic()),
]


@functools.cache
def plan_of(bins: str = "fresh") -> lc.Plan:
    sampling = lc.BallsInBins(bins)  # type: ignore[arg-type]
    return lc.plan(1000, 250, epochs=2, epsilon=2.0, delta=1e-2, mechanism=lc.LambdaCGD(0.9), sampling=sampling)


@pytest.mark.parametrize(
    ("mechanism", "sampling"), PLANS, ids=lambda value: value.kind if isinstance(value, lc.Sampling) else value.name
)
def test_every_kind_of_plan_passes(mechanism: lc.Mechanism, sampling: lc.Sampling) -> None:
    plan = lc.plan(1003, 200, epochs=3, epsilon=2.0, delta=1e-2, mechanism=mechanism, sampling=sampling)
    result = lc.audit(plan, runs=2, seed=0)
    assert result.passed, str(result)  # false alarms: 1e-4


@pytest.mark.parametrize(("examples", "batch_size", "epochs"), [(40, 4, 2), (600, 600, 4), (300, 100, 1)])
def test_odd_shapes_pass(examples: int, batch_size: int, epochs: int) -> None:
    """Few examples with bins that stay empty; one bin; one epoch."""
    for sampling in (lc.BallsInBins("fixed"), lc.BallsInBins("fresh")):
        mechanism = lc.LambdaCGD(0.5)
        plan = lc.plan(
            examples,
            batch_size,
            epochs=epochs,
            epsilon=2.0,
            delta=1e-2,
            mechanism=mechanism,
            sampling=sampling,
        )
        result = lc.audit(plan, runs=3, seed=0)
        assert result.passed, str(result)  # false alarms: 1e-4


def own_loop(model: Any, optimizer: Any, dataset: Any, plan: lc.Plan, max_grad_norm: float) -> None:
    """Physical batches, a sum instead of a mean, a learning rate that changes."""
    private = lc.privatize(
        model, optimizer, dataset, plan, max_grad_norm=max_grad_norm, max_physical_batch_size=60, loss_reduction="sum"
    )
    for batch in private.loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if private.between_steps:
            optimizer.param_groups[0]["lr"] *= 0.9
    private.detach()


def sloppy_loop(model: Any, optimizer: Any, dataset: Any, plan: lc.Plan, max_grad_norm: float) -> None:
    """A mistake that privatize cannot see: clipping to another norm than the noise's owner thinks."""
    plain_loop(model, optimizer, dataset, plan, 0.9 * max_grad_norm)


def short_loop(model: Any, optimizer: Any, dataset: Any, plan: lc.Plan, max_grad_norm: float) -> None:
    private = lc.privatize(model, optimizer, dataset, plan, max_grad_norm=max_grad_norm)
    for batch in private.loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        break
    private.detach()


def test_the_users_own_loop_is_run() -> None:
    assert lc.audit(plan_of(), own_loop, runs=2, max_grad_norm=0.7, seed=0).passed  # false alarms: 1e-4
    result = lc.audit(plan_of(), sloppy_loop, runs=2, seed=0)
    assert "noise scale" in {check.name for check in result.failed}


def test_a_loop_that_stops_early_is_named() -> None:
    result = lc.audit(plan_of(), short_loop, runs=1)
    assert [check.name for check in result.failed] == ["steps"]
    assert "1 releases, the plan has 8" in str(result)
    json.dumps(result.to_dict())


def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    result = lc.audit(plan_of(), runs=2, seed=0)
    result.save(tmp_path / "audit.json")
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert stored["passed"] is result.passed is True
    assert stored["plan_digest"] == plan_of().digest
    assert stored["false_alarm_rate"] == 1e-4
    assert all(0 <= test["p_value"] <= 1 and test["passed"] for test in stored["tests"])
    assert 0 < stored["lower_bound"]["epsilon"] < 2
    assert {"noise scale", "lattice", "ε"} <= {test["name"] for test in stored["tests"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": float("inf")}, "no noise"),
        ({"examples": 20, "batch_size": 5}, "at least 33"),
        ({"examples": 30_000, "batch_size": 2, "sampling": lc.Cyclic()}, "at most 5000"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"examples": 1000, "batch_size": 250, "epochs": 1, "epsilon": 2.0, "delta": 1e-2} | changes
    plan = lc.plan(**given, mechanism=lc.LambdaCGD(0.5))
    with pytest.raises(lc.InvalidInput, match=message):
        lc.audit(plan)


def test_the_command_line_audits_a_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of().save(tmp_path / "plan.json")
    (tmp_path / "loops_of_mine.py").write_text("from tests.audit.test_report import short_loop\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "plan.json", "--runs", "2", "--canaries", "500", "--out", "audit.json"]) == 0
    assert "nothing was caught" in capsys.readouterr().out
    assert json.loads(Path("audit.json").read_text())["canaries_of_a_run"] == 500
    assert cli.main(["audit", "plan.json", "--runs", "1", "--json", "--train", "loops_of_mine:short_loop"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert cli.main(["audit", "plan.json", "--train", "loops_of_mine:none"]) == 2
