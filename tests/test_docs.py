"""The docs site builds strictly, its Python examples parse, and every `lc.name` in it exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lambdacgd as lc

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_site_builds_strictly(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_docs_exist(page):
    text = page.read_text()
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        ast.parse(code)
    missing = {name for name in re.findall(r"\blc\.([A-Za-z_]+)", text) if not hasattr(lc, name)}
    assert not missing, f"{page.name} names lc.{', lc.'.join(sorted(missing))}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_do_not_mention_private_places(page):
    assert "../shared" not in page.read_text()


def test_the_migration_page_runs():
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    x = torch.randn(2000, 1, 8, 8)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = {"model": model, "optimizer": optimizer, "dataset": TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())}
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), flags=re.S)
    exec(
        first.replace("delta=1e-5)", "delta=1e-5, mechanism=lc.LambdaCGD(0.6))"), known
    )  # a λ searched for takes seconds
    known["old"] = {f"_module.{name}": value for name, value in model.state_dict().items()}
    planned = []
    for code in others:
        exec(code, known)
        planned.append(known["plan"])
    assert known["private"].finished
    page = (ROOT / "docs" / "migrating.md").read_text()
    poisson = lc.plan(
        2000, 100, epochs=3, noise_multiplier=1.0, delta=1e-4, mechanism=lc.Identity(), sampling=lc.Poisson()
    )
    assert f"# {poisson.epsilon:.3g}\n" in page
    assert f"# {planned[1].epsilon:.3g}: λCGD" in page
    assert planned[2].sigma == pytest.approx(1.673, abs=5e-4)
