"""verify certifies σ again: edited plans and cards are refused, whatever their digests say."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd import cache, cli
from lambdacgd.accounting.certificate import set_aside
from lambdacgd.planning import _digest
from lambdacgd.questions import verify
from lambdacgd.training.step import check_plan


@functools.cache
def plan_of(bins: str = "fixed", *, epsilon: float = 2.0) -> lc.Plan:
    sampling = lc.BallsInBins(bins)  # type: ignore[arg-type]
    return lc.plan(400, 200, epochs=2, epsilon=epsilon, delta=1e-4, mechanism=lc.LambdaCGD(0.9), sampling=sampling)


def edited(tmp_path: Path, plan: lc.Plan, **changes: Any) -> Path:
    """A plan file whose digest was computed again after an edit."""
    content = plan.to_dict() | changes
    del content["digest"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content | {"digest": _digest(content)}))
    return path


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_a_plan_is_certified_again(bins: str, tmp_path: Path) -> None:
    plan = plan_of(bins)
    plan.save(tmp_path / "plan.json")
    result = verify(tmp_path / "plan.json")
    assert (result.epsilon, result.delta) == (plan.epsilon, plan.delta)
    assert (result.kind, result.method, result.confidence) == ("bound", plan.certificate.method, 1.0)


def test_chosen_normalised_bands_are_certified_again(tmp_path: Path) -> None:
    """From a file: their coefficients are in it. With less noise they are refused."""
    bands = lc.BandInvMF(3, normalized=True, amplified=True)
    plan = lc.plan(400, 20, epochs=2, epsilon=4.0, delta=1e-4, mechanism=bands)
    plan.save(tmp_path / "plan.json")
    assert verify(tmp_path / "plan.json").method == "transfer-matrix-composed"
    with pytest.raises(lc.InvalidInput, match="This plan is false"):
        verify(edited(tmp_path, plan, sigma=plan.sigma * 0.98, rmse=plan.rmse * 0.98, maxse=plan.maxse * 0.98))


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
@pytest.mark.parametrize("share", [0.1, 0.98])
def test_an_edited_plan_with_its_digest_recomputed_is_refused(bins: str, share: float, tmp_path: Path) -> None:
    plan = plan_of(bins)
    path = edited(tmp_path, plan, sigma=plan.sigma * share, rmse=plan.rmse * share, maxse=plan.maxse * share)
    lc.Plan.load(path).check()  # nothing in the file betrays it
    with pytest.raises(lc.InvalidInput, match="This plan is false"):
        verify(path)


def test_a_smaller_epsilon_than_was_certified_is_refused(tmp_path: Path) -> None:
    plan = plan_of()
    details = plan.certificate.details | {"floating_point": set_aside(1.0, plan.delta)}
    certificate = plan.certificate.to_dict() | {"epsilon": 1.0, "details": details}
    path = edited(tmp_path, plan, epsilon=1.0, certificate=certificate)
    check_plan(lc.Plan.load(path))  # nothing in the file betrays it
    with pytest.raises(lc.InvalidInput, match="This plan is false: it claims ε = 1 at"):
        verify(path)


def test_a_plan_that_was_asked_for_sigma_is_certified_again() -> None:
    settings = {"mechanism": lc.LambdaCGD(0.9), "sampling": lc.BallsInBins("fixed")}
    plan = lc.plan(400, 200, epochs=2, noise_multiplier=7.0, delta=1e-4, **settings)
    assert verify(plan).epsilon == plan.epsilon


@pytest.mark.parametrize(("bins", "examples"), [("fixed", 400), ("fresh", 60)])
def test_a_certificate_through_columns_that_dominate_is_made_again(bins: str, examples: int, tmp_path: Path) -> None:
    settings = {"mechanism": lc.BISR(4), "sampling": lc.BallsInBins(bins)}  # type: ignore[arg-type]
    plan = lc.plan(examples, 10, epochs=2, epsilon=4.0, delta=1e-3, **settings)
    assert "dominated_by" in plan.certificate.details
    assert verify(plan).confidence == 1
    share = 0.97
    path = edited(tmp_path, plan, sigma=plan.sigma * share, rmse=plan.rmse * share, maxse=plan.maxse * share)
    with pytest.raises(lc.InvalidInput, match="This plan is false"):
        verify(path)


def test_the_cache_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()

    def believed(*_: Any) -> Any:
        raise AssertionError("the cache was asked")

    monkeypatch.setattr(cache, "_secret", believed)
    verify(plan)


def test_what_claims_nothing_is_refused() -> None:
    plan = lc.plan(4000, 1000, epochs=3, epsilon=float("inf"), delta=1e-5, mechanism=lc.LambdaCGD(0.9))
    with pytest.raises(lc.InvalidInput, match="claims nothing"):
        verify(plan)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """What ``lc.export`` writes."""
    plan = plan_of()
    data = TensorDataset(torch.randn(400, 3), torch.randn(400, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0)
    for x, y in private.loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lc.export(private, tmp_path / "release")


def edit_card(release: Path, **changes: Any) -> None:
    path = release / "privacy-card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_release_is_certified_by_its_card(release: Path) -> None:
    assert verify(release).epsilon == verify(release / "privacy-card.json").epsilon == plan_of().epsilon


def test_an_edited_card_is_refused(release: Path) -> None:
    edit_card(release, sigma=plan_of().sigma / 2)
    with pytest.raises(lc.InvalidInput, match="This card is false"):
        verify(release)


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0.5},
        {"delta": 1e-9},
        {"earlier_runs": [{"epsilon": 3.0, "delta": 1e-5}]},
        {"claim": "(0.5, 1e-05)-differentially private"},
    ],
)
def test_a_card_that_claims_less_than_its_runs_is_refused(release: Path, changes: dict[str, Any]) -> None:
    edit_card(release, **changes)
    with pytest.raises(lc.InvalidInput, match="its runs add up to"):
        verify(release)


@pytest.mark.parametrize("run", [(-1.0, 0.0), (0.0, -1e-5)])
def test_an_earlier_run_takes_nothing_off(release: Path, run: tuple[float, float]) -> None:
    """A card with an earlier run of ε = −1 was verified as one of ε = 1, where this run alone costs 2."""
    epsilon, delta = (own + less for own, less in zip((2.0, 1e-4), run, strict=True))
    claim = f"({epsilon:g}, {delta:g})-differentially private"
    edit_card(release, epsilon=epsilon, delta=delta, claim=claim, earlier_runs=[{"epsilon": run[0], "delta": run[1]}])
    with pytest.raises(lc.InvalidInput, match="not a whole privacy card"):
        verify(release)


@pytest.mark.parametrize("claim", ["none: trained for debugging", "private"])
def test_a_card_without_a_claim_is_not_certified(release: Path, claim: str) -> None:
    edit_card(release, claim=claim)
    with pytest.raises(lc.InvalidInput, match="claims nothing"):
        verify(release)


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 100_000, "\N{SNOWMAN}", '{"format": "lambdacgd-privacy-card-1"}'])
def test_other_files_are_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text, encoding="utf-8")
    with pytest.raises(lc.InvalidInput):
        verify(tmp_path / "file.json")


def test_the_command_line_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    assert cli.main(["verify", str(tmp_path / "plan.json")]) == 0
    assert "certified anew" in capsys.readouterr().out
    false = edited(tmp_path, plan, sigma=plan.sigma / 2, rmse=plan.rmse / 2, maxse=plan.maxse / 2)
    assert cli.main(["verify", str(false)]) == 2
    assert "This plan is false" in capsys.readouterr().err


def test_a_release_by_an_edited_plan_is_refused(tmp_path: Path) -> None:
    plan = plan_of()
    low = {name: getattr(plan, name) * 0.9 for name in ("sigma", "rmse", "maxse")}
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(400, 3), torch.zeros(400, dtype=torch.int64))
    private = lc.privatize(model, optimizer, data, lc.Plan.load(edited(tmp_path, plan, **low)), max_grad_norm=1.0)
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(lc.InvalidInput, match="This plan is false"):
        lc.export(private, tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_what_is_set_aside_for_floating_point_is_not_for_the_noise(tmp_path: Path) -> None:
    plan = plan_of("fresh")
    low = {name: getattr(plan, name) * 0.9993 for name in ("sigma", "rmse", "maxse")}
    with pytest.raises(lc.InvalidInput, match="This plan is false"):
        verify(edited(tmp_path, plan, **low))
