"""Training from a file sorted by bin is training from the same data in memory."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.keys import LedgerError
from lambdacgd.sampling import BinSortedParquet
from lambdacgd.training.step import PrivateStep
from tests.training.graphs import on_the_host
from tests.training.test_captured import Eager

SEED = 11
N = 60


@pytest.fixture
def prepared(tmp_path):
    """A key, a prepared run, and 60 examples as arrays and as a file that DuckDB sorted by the run's bins."""
    rng = np.random.default_rng(SEED)
    x, y = rng.normal(size=(N, 3)).astype(np.float32), rng.integers(0, 2, size=N)
    key = lc.SecretKey.generate()
    key.save(tmp_path / "run.key")
    run_id = key.ledger().new_run()
    plan = lc.plan(
        N, 10, epochs=2, epsilon=8.0, delta=1e-3, mechanism=lc.LambdaCGD(0.5), sampling=lc.BallsInBins("fixed")
    )
    bins = plan.sampling.bin_of(key, np.arange(N), run=run_id)
    table = pa.table({"id": np.arange(N), "bin": bins, "x": x.tolist(), "y": y})
    pq.write_table(table, tmp_path / "data.parquet")
    source, target = tmp_path / "data.parquet", tmp_path / "sorted.parquet"
    duckdb.sql(f"COPY (SELECT * FROM '{source}' ORDER BY bin, id) TO '{target}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    return key, run_id, plan, x, y, target


def collate(rows):
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


def train(data, key, run_id, plan, *, options):
    torch.manual_seed(SEED)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0, key=key, run_id=run_id, **options)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    private.detach()
    return model.weight.detach().clone()


def test_the_sorted_file_trains_the_same_model(prepared):
    key, run_id, plan, x, y, target = prepared
    memory = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    expected = train(memory, key, run_id, plan, options={})
    key.ledger().declare_destroyed(run_id, 0)  # the same run again, which is otherwise refused
    file = BinSortedParquet(target, plan.sampling)
    found = train(file, key, run_id, plan, options={"collate_fn": collate, "max_physical_batch_size": 4})
    torch.testing.assert_close(found, expected)


def test_a_captured_step_reads_the_files_bins(prepared, monkeypatch):
    """In the file's order an example's number is not its row: bins by row would put it in two bins of a mixed run."""
    monkeypatch.setattr("lambdacgd.training.captured._check", lambda loop, plan, data: torch.device("cpu"))
    monkeypatch.setattr(PrivateStep, "add_noise_", on_the_host(PrivateStep.add_noise_))
    key, run_id, plan, x, y, target = prepared
    memory = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    expected = train(memory, key, run_id, plan, options={})
    key.ledger().declare_destroyed(run_id, 0)
    file = BinSortedParquet(target, plan.sampling)
    torch.manual_seed(SEED)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = lc.privatize(model, optimizer, file, plan, max_grad_norm=1.0, key=key, run_id=run_id, collate_fn=collate)
    rows = collate([file[i] for i in range(N)])
    Eager(private, private.loader, lambda model, x, y: F.cross_entropy(model(x), y), rows, None).run()
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_file_of_another_run_or_sampling_is_refused(prepared):
    key, run_id, plan, *_, target = prepared
    file = BinSortedParquet(target, plan.sampling)
    with pytest.raises(ValueError, match="not those of this key, run"):
        train(file, key, None, plan, options={"collate_fn": collate})
    longer = lc.plan(
        N, 10, epochs=3, epsilon=8.0, delta=1e-3, mechanism=lc.LambdaCGD(0.5), sampling=lc.BallsInBins("fixed")
    )
    with pytest.raises(lc.TrainingError, match="was sorted for"):
        train(file, key, run_id, longer, options={"collate_fn": collate})


def test_a_prepared_run_that_released_weights_does_not_start_over(prepared, tmp_path):
    """Contract 4: the same run id means the same noise."""
    key, run_id, plan, x, y, _ = prepared
    memory = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    key.ledger().record(run_id, 3, digest="weights", kind="checkpoint")
    with pytest.raises(LedgerError, match="released weights after step 3"):
        train(memory, key, run_id, plan, options={})
    with pytest.raises(lc.InvalidInput, match="A prepared run is in the ledger"):
        train(memory, lc.SecretKey.generate(), run_id, plan, options={})
