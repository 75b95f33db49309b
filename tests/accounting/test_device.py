"""Accountants compute on the CPU unless somebody asks otherwise."""

from __future__ import annotations

from lambdacgd.accounting.base import device
from lambdacgd.accounting.transfer_matrix import TransferMatrix


def test_the_device_is_a_choice_not_a_coincidence(monkeypatch):
    monkeypatch.delenv("LAMBDACGD_ACCOUNTING_DEVICE", raising=False)
    assert device() == TransferMatrix(0.5, 10, 2).torch_device() == "cpu"
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", "cuda:1")
    assert device() == TransferMatrix(0.5, 10, 2).torch_device() == "cuda:1"
    assert TransferMatrix(0.5, 10, 2, device="cpu").torch_device() == "cpu"
