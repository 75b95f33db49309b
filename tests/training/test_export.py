"""What leaves: weights and a card. What never does: key, sub-keys, noise, sums, losses, bins."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.errors import at_least, rounded_up
from lambdacgd.noise import NoiseField
from lambdacgd.training import TrainingError, export, privatize
from lambdacgd.training.card import History, card, replace_one
from tests.noise.helpers import fill
from tests.training import oracle


def secrets_of(private, losses, sums):
    """Byte patterns that must not be in anything that leaves (in a checkpoint, the run id and fingerprint may be)."""
    key, run = private.run.key, private.run.id
    found = {"the key": oracle.KEY}
    for path in (("noise",), ("bins",), ("bins", 1), ("bins", 2), ("order",)):
        found[f"the sub-key of {path}"] = key.derive("run", run, *path)
    for what, raw in list(found.items()):
        found[f"{what} in hex"] = raw.hex().encode()
        found[f"{what} in base64"] = base64.b64encode(raw)[:40]
    field = NoiseField(key, private.private_step.layout, run_id=run)
    for step in (1, 2, private.steps_taken):
        z = {name: torch.zeros(p.shape) for name, p in private.clipper.parameters.items()}
        fill(field, z, step)
        for name, value in z.items():
            found[f"z[{step}] of {name}"] = value.flatten()[:2].numpy().tobytes()
            scaled = value.flatten()[:2] * private.plan.sigma * private.max_grad_norm
            found[f"scaled z[{step}] of {name}"] = scaled.numpy().tobytes()
    for i, loss in enumerate(losses):
        found[f"loss {i}"] = f"{loss:.5f}".encode()
        found[f"loss {i} in bytes"] = torch.tensor(loss).numpy().tobytes()
    for i, total in enumerate(sums):
        found[f"sum {i}"] = total.flatten()[:2].numpy().tobytes()
    return found


@functools.cache
def certified(bins):
    """A plan whose σ ``lc.export`` certifies again."""
    options = {"mechanism": lc.LambdaCGD(0.6), "sampling": lc.BallsInBins(bins)}
    return lc.plan(48, 12, epochs=2, epsilon=4.0, delta=1e-5, **options)


def trained(tmp_path, p=None):
    key = oracle.key()
    key.save(tmp_path / "run.key")
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    private = privatize(module, optimizer, oracle.data(), p or oracle.plan(), max_grad_norm=0.7, key=key)
    losses, sums = [], []
    for x, y in private.loader:
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        losses.append(loss.item())
        sums.append(private.clipper.sums["0.weight"].clone())
        optimizer.step()
        optimizer.zero_grad()
    return private, secrets_of(private, losses, sums)


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_nothing_secret_leaves(tmp_path, bins):
    private, patterns = trained(tmp_path, certified(bins))
    folder = export(private, tmp_path / "out" / "release")
    private.save(tmp_path / "checkpoint")
    assert sorted(p.name for p in folder.iterdir()) == ["PRIVACY.md", "model.safetensors", "privacy-card.json"]
    public = {path.name: path.read_bytes() for path in folder.iterdir()}
    for what in ("run id", "fingerprint"):
        value = private.run.id if what == "run id" else private.run.key.fingerprint()
        assert not [name for name, content in public.items() if value.encode() in content], what
    saved = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert saved
    for name, content in {**public, **saved}.items():
        for what, pattern in patterns.items():
            assert pattern not in content, f"{what} is in {name}"
    sizes = [len(i) for i in private.plan.sampling.batches(private.run.key, run=private.run.id)]
    assert str(sizes).encode() not in b"".join(public.values())


def test_the_grep_finds_what_is_there(tmp_path):
    private, patterns = trained(tmp_path)
    assert patterns["the key in hex"] in (tmp_path / "run.key").read_bytes()
    assert (
        private.model[0].weight.detach().flatten()[:2].numpy().tobytes()
        in (export(private, tmp_path / "r") / "model.safetensors").read_bytes()
    )


def test_the_weights_are_the_models(tmp_path):
    private, _ = trained(tmp_path)
    with private.ema(0.5).applied():
        export(private, tmp_path / "average")
    private.detach()
    export(private, tmp_path / "plain")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    assert weights.keys() == private.model.state_dict().keys()
    assert all(torch.equal(v, private.model.state_dict()[n]) for n, v in weights.items())


def test_adapters_are_exported_alone(tmp_path):
    module = oracle.model()
    for p in list(module.parameters())[:2]:
        p.requires_grad_(False)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    private = privatize(module, optimizer, oracle.data(), certified("fresh"), max_grad_norm=0.7)
    export(private, tmp_path / "adapters", frozen=False)
    weights = load_file(tmp_path / "adapters" / "model.safetensors")
    assert weights.keys() == trainable
    other = oracle.model(seed=9)
    assert not other.load_state_dict(weights, strict=False).unexpected_keys
    assert all(torch.equal(value, private.model.state_dict()[name]) for name, value in weights.items())


def test_tied_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.down(self.up(x))

    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(torch.randn(48, 4))
    private = privatize(module, optimizer, dataset, oracle.plan(), max_grad_norm=1.0)
    for (x,) in private.loader:
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path / "tied"
    (tmp_path / ".tied.draft").mkdir()  # a killed process left it
    export(private, folder)
    assert not (tmp_path / ".tied.draft").exists()
    assert len(load_file(folder / "model.safetensors")) == 3
    again = Tied()
    load_model(again, folder / "model.safetensors")
    assert again.up.weight is again.down.weight
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items())


def test_the_card_says_what_is_claimed(tmp_path):
    p = oracle.plan(epsilon=2.0)
    private, _ = trained(tmp_path, p)
    folder = export(private, tmp_path / "release")
    card = json.loads((folder / "privacy-card.json").read_text())
    assert card["claim"] == "(2, 1e-05)-differentially private"
    assert (card["epsilon"], card["delta"], card["sigma"]) == (2.0, 1e-5, p.sigma)
    assert "zero-out" in card["adjacency"]
    real = card["replace_one"]["epsilon"] - (2.0**-10 + 2.0 * 2.0**-11)  # the rest is for floating point
    doubled = gaussian_delta(real, p.sigma / (2 * p.sensitivity))
    assert doubled == pytest.approx(1e-5 * (1 - 2.0**-8), rel=1e-6)
    assert card["replace_one"]["delta"] == 1e-5
    assert card["mechanism"] == {"name": "lambda-cgd", "lam": 0.6, "normalized": False}
    assert card["sampling"]["name"] == "cyclic"
    assert card["certificate"]["method"] == "analytic"
    assert card["library"] == f"lambdacgd {lc.__version__}"
    assert any("hyperparameters" in item for item in card["not_covered"])
    text = (folder / "PRIVACY.md").read_text()
    for part in (
        "(2, 1e-05)-differentially private",
        "zero-out",
        "Replace-one",
        "lambda-cgd, lam = 0.6",
        "hyperparameters",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("bins", "words"),
    [
        (None, "over all 8 steps"),
        ("fixed", r"over all 8 steps, bins drawn once and kept \(fixed bins\)"),
        ("fresh", r"redrawn and noise restarts every 4 steps \(fresh bins\)"),
    ],
)
def test_the_card_says_which_bins(tmp_path, bins, words):
    p = oracle.plan() if bins is None else certified(bins)
    private, _ = trained(tmp_path, p)
    folder = export(private, tmp_path / "r")
    card = json.loads((folder / "privacy-card.json").read_text())
    assert re.search(words + "$", card["correlation"])
    assert card["sampling"].get("bins") == getattr(p.sampling, "bins", None)
    assert f"| Correlated noise | {card['correlation']} |" in (folder / "PRIVACY.md").read_text()


def test_a_card_that_claims_nothing(tmp_path):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        private = privatize(module, optimizer, oracle.data(), oracle.plan(epsilon=math.inf), max_grad_norm=1.0)
    card = json.loads((export(private, tmp_path / "inf") / "privacy-card.json").read_text())
    assert card["claim"].startswith("none: trained without noise")
    assert (card["epsilon"], card["replace_one"]["epsilon"]) == ("inf", "inf")  # who reads numbers alone is told, too


def test_replacing_an_example():
    p = oracle.binned_plan(48, 12, 2)  # ε = 1, δ = 1e-5
    assert replace_one(p)[:2] == (2.0, pytest.approx((1 + math.e) * 1e-5))
    assert replace_one(dataclasses.replace(p, epsilon=1000.0))[:2] == (2000.0, 1.0)
    assert rounded_up(3.14151) == "3.142"
    assert float(rounded_up(2.0001)) >= 2.0001


@given(st.floats(1e-12, 1e6))
def test_no_claim_is_printed_smaller_than_it_is(value):
    assert value <= float(at_least(value)) <= value * (1 + 1.1e-5)
    assert at_least(2.0) == "2"
    assert at_least(2.9574006) == "2.95741"


def test_refusals(tmp_path):
    with pytest.raises(lc.InvalidInput, match=r"private must be what privatize returned.*a Linear was given"):
        export(nn.Linear(2, 2), tmp_path / "r")
    private, _ = trained(tmp_path)
    export(private, tmp_path / "r")
    with pytest.raises(TrainingError, match="never overwritten"):
        export(private, tmp_path / "r")
    assert not list(tmp_path.glob(".*.draft"))


@pytest.mark.parametrize("sigma", [3.3333, 4.1, 5.7, 9.25])
def test_a_claim_is_not_rounded_down(sigma):
    cyclic = {"mechanism": lc.Identity(), "sampling": lc.Cyclic()}
    p = lc.plan(48, 12, epochs=2, noise_multiplier=sigma, delta=1.234561e-5, **cyclic)
    p = dataclasses.replace(p, epsilon=p.epsilon + 1e-9)
    settings = {"max_grad_norm": 1.0, "clipping_mode": "flat", "augmentations": 1}
    claim = card(p, History(), settings, floating_point=None, steps_taken=0)["claim"]
    epsilon, delta = map(float, claim[1 : claim.index(")")].split(","))
    assert p.epsilon <= epsilon < p.epsilon * (1 + 1e-5)
    assert p.delta <= delta < p.delta * (1 + 1e-5)
