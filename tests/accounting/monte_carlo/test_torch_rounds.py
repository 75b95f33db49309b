"""The torch path: the same weights for the same samples, samples of the same law, and on CUDA the same answer."""

import math
from itertools import pairwise

import numpy as np
import pytest

from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.monte_carlo.estimate import Estimator
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.accounting.monte_carlo.proposal import Pilot, Proposal, TorchRounds, levels_of, stratified, weights_of
from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD

torch = pytest.importorskip("torch")
GRAM = gram_of(BISR(3), Horizon(24, 3))
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CASES = [("remove", 1.0, 3.0), ("remove", 4.0, 1.4), ("add", 0.3, 6.0)]


def proposal_of(direction: OneWay, epsilon: float, sigma: float) -> Proposal:
    return Pilot(GRAM, levels_of(GRAM), seed=1).proposal(epsilon, sigma, direction, envelope_share=0.3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("direction", "epsilon", "sigma"), CASES)
def test_the_same_samples_weigh_the_same(device: str, direction: OneWay, epsilon: float, sigma: float) -> None:
    proposal = proposal_of(direction, epsilon, sigma)
    samples = proposal.draw(np.random.default_rng(2), proposal.round)
    weights = TorchRounds(proposal, device).weights(torch.as_tensor(samples, device=device)).cpu().numpy()
    expected = proposal.weights(samples)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12 * expected.max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("direction", "epsilon", "sigma"), CASES)
def test_the_same_delta(device: str, direction: OneWay, epsilon: float, sigma: float) -> None:
    """Two independent estimates within 5 joint standard errors (false alarm below 6e-7), component by component too."""
    proposal = proposal_of(direction, epsilon, sigma)
    here = weights_of(proposal, np.random.SeedSequence(3), 8)
    there = np.stack(list(TorchRounds(proposal, device).rounds(np.random.SeedSequence(4), 8)))
    (value, error), (other, other_error) = stratified(here, proposal), stratified(there, proposal)
    assert abs(value - other) < 5 * math.hypot(error, other_error)
    edges = np.concatenate([[0], np.cumsum(proposal.counts(proposal.round))])
    for first, stop in pairwise(edges):
        a, b = here[:, first:stop], there[:, first:stop]
        assert abs(a.mean() - b.mean()) < 6 * math.sqrt((a.var() + b.var()) / a.size) + 1e-300


def test_rounds_are_reproducible() -> None:
    proposal = proposal_of("remove", 1.0, 3.0)
    first, second = (next(TorchRounds(proposal, "cpu").rounds(np.random.SeedSequence(9), 1)) for _ in range(2))
    assert (first == second).all()


def test_only_dense_matrices_go_there() -> None:
    gram = gram_of(LambdaCGD(0.5), Horizon(8, 2))
    proposal = Pilot(gram, levels_of(gram), seed=1).proposal(1.0, 2.0, "remove", envelope_share=0.3)
    with pytest.raises(TypeError, match="dense"):
        TorchRounds(proposal, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_is_used_when_asked_for_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = gram_of(BISR(4), Horizon(390, 10))
    slow = Estimator(gram).one_way(8.0, 1.5436, "remove", samples=32_768)
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", "cuda")
    fast = Estimator(gram).one_way(8.0, 1.5436, "remove", samples=65_536)
    assert fast.value != slow.value
    assert abs(fast.value - slow.value) < 5 * math.hypot(fast.standard_error, slow.standard_error)
