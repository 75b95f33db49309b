"""Accountants compute on the CPU unless somebody asks otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from lambdacgd.accounting.base import device
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.transfer_matrix import TransferMatrix
from lambdacgd.mechanisms import Horizon, LambdaCGD


def test_the_device_is_a_choice_not_a_coincidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMBDACGD_ACCOUNTING_DEVICE", raising=False)
    assert device() == TransferMatrix(0.5, 10, 2).torch_device() == "cpu"
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", "cuda:1")
    assert device() == TransferMatrix(0.5, 10, 2).torch_device() == "cuda:1"
    assert TransferMatrix(0.5, 10, 2, device="cpu").torch_device() == "cpu"


def test_cached_answers_belong_to_their_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    accountant = MonteCarlo(LambdaCGD(0.5), Horizon(4, 2))
    asked = []
    for name in ("cpu", "cuda", "cpu"):
        monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", name)
        accountant._cached("test", {}, lambda name=name: asked.append(name))
    assert asked == ["cpu", "cuda"]
