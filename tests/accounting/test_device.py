"""Which device accountants are asked to use, and by whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lambdacgd.accounting.certificate import device
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.monte_carlo import proposal as module
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.accounting.monte_carlo.proposal import Pilot, levels_of
from lambdacgd.errors import DeviceError
from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD


def test_the_environment_and_then_the_accountant_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMBDACGD_ACCOUNTING_DEVICE", raising=False)
    assert device() == TransferMatrix(0.5, 10, 2).device_asked_for() == "auto"
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", "cuda:1")
    assert device() == TransferMatrix(0.5, 10, 2).device_asked_for() == "cuda:1"
    assert TransferMatrix(0.5, 10, 2, device="cpu").device_asked_for() == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "mps", "cpu "])
def test_an_unknown_device_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", name)
    with pytest.raises(DeviceError, match=r"^LAMBDACGD_ACCOUNTING_DEVICE is .* cpu, cuda"):
        device()


def test_monte_carlo_samples_on_a_device_only_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another generator gives other numbers: plans must not change with what is plugged in."""
    gram = gram_of(BISR(3), Horizon(80, 2))
    proposal = Pilot(gram, levels_of(gram), seed=1).proposal(1.0, 2.0, "remove", envelope_share=0.3)
    asked: list[str] = []
    monkeypatch.setattr(module, "TorchRounds", lambda proposal, device: asked.append(device) or Nothing())
    for name in ("", "auto", "cpu", "cuda"):
        monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", name)
        list(module.rounds(proposal, np.random.SeedSequence(1), 1))
    assert asked == ["cuda"]


class Nothing:
    def rounds(self, seeds: np.random.SeedSequence, count: int) -> list[float]:
        return []


def test_cached_answers_belong_to_their_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    accountant = MonteCarlo(LambdaCGD(0.5), Horizon(4, 2))
    asked = []
    for name in ("cpu", "cuda", "cpu"):
        monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", name)
        accountant._cached("test", {}, lambda name=name: asked.append(name))
    assert asked == ["cpu", "cuda"]
