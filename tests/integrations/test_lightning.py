"""Lightning's automatic optimisation, truly private: equal to the loop by hand, whatever happens around it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lambdacgd as lc
from lambdacgd.training import privatize
from tests.training import oracle

pytest.importorskip("lightning")
import lightning
from lightning.pytorch.loggers import CSVLogger

from tests.integrations.lit import KEY, Module, fit

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def by_hand(run):
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    private = privatize(
        module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, key=lc.SecretKey.from_bytes(KEY)
    )
    private.run._id = run
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for x, y in private.loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return oracle.weights(module)


@pytest.mark.parametrize(
    "given", [{}, {"strategy": {"submodule": "net"}, "module": "parts"}], ids=["whole", "submodule"]
)
def test_lightning_equals_the_loop_by_hand(given, tmp_path):
    if given:
        given = given | {"module": Module(whole=False)}
    module, strategy, trainer = fit(tmp_path, run="one", key=lc.SecretKey.from_bytes(KEY), **given)
    plan = strategy.plan
    assert trainer.global_step == strategy.private.steps_taken == plan.steps
    assert trainer.current_epoch == plan.epochs
    assert max(module.seen) <= 5
    assert len(module.seen) > plan.steps
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * 0.9**plan.steps)
    lc.export(strategy.private, tmp_path / "release")
    assert (tmp_path / "release" / "PRIVACY.md").exists()
    if not given:  # a submodule's parameters have other names, so other noise
        for name, value in by_hand("one").items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_without_noise_it_is_plain_lightning(tmp_path):
    plan = oracle.plan(batch_size=48, epochs=3, epsilon=float("inf"))
    module, _, _ = fit(tmp_path, plan=plan)
    plain = Module()
    trainer = lightning.Trainer(
        max_epochs=3, logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(plain, DataLoader(oracle.data(), batch_size=48))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_what_is_logged_is_the_plans_claim(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    _, strategy, trainer = fit(tmp_path, logger=logger, log_every_n_steps=1)
    rows = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("privacy_epsilon")
    values = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert values == [strategy.plan.epsilon] * strategy.plan.steps
    assert trainer.callback_metrics["val_loss"] > 0
    assert strategy.private.spent().epsilon == strategy.plan.epsilon


def test_validation_within_an_epoch_changes_nothing(tmp_path):
    key = lc.SecretKey.from_bytes(KEY)
    ends = [
        fit(tmp_path / name, run="one", key=key, module=Module(dropout=0.3), **given)[0].state_dict()
        for name, given in (("once", {}), ("often", {"val_check_interval": 1}))
    ]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_bfloat16(tmp_path):
    module, strategy, _ = fit(tmp_path, precision="bf16-mixed")
    assert strategy.private.finished
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in module.parameters())
