"""The docs site builds strictly, its Python parses and fits, every name in it exists, and the main pages run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import lambdacgd as lc
from lambdacgd.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def test_site_builds_strictly(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A formula that is not recognised, by its indentation, say, is left as it stands.
    assert not [page for page in tmp_path.rglob("*.html") if "$$" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_docs_exist(page):
    text = page.read_text()
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):  # what examples import from this package must be there
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lambdacgd"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or importlib.util.find_spec(inner), f"{page.name}: {inner}"
    missing = {name for name in re.findall(r"\blc\.([A-Za-z_]+)", text) if not hasattr(lc, name)}
    assert not missing, f"{page.name} names lc.{', lc.'.join(sorted(missing))}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_80_columns(page):
    wide = [line for block in blocks(page) for line in block.splitlines() if len(line) > 80]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_name_what_a_reader_has(page):
    text = page.read_text()
    assert "../shared" not in text
    assert not re.search(r"pip install '?lambdacgd", text), "it is not on PyPI: '.[extra]' in a checkout"
    for named in re.findall(r"`((?:examples|benchmarks|results|reproduce|tests)/[\w./-]+\.\w+)`", text):
        assert (ROOT / named).exists(), f"{page.name} names {named}"


def test_errors_name_no_package_that_is_not_published():
    code = {path.name: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    assert not [name for name, text in code.items() if "lambdacgd[" in text]


def test_workflows_are_yaml():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text())["jobs"], path.name


def links(text: str) -> list[str]:
    return re.findall(r"\]\(((?!#)[^)]+)\)", text)


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_beside_the_site_lead_somewhere(name):
    """mkdocs looks at docs/ only."""
    for target in links((ROOT / name).read_text()):
        if target.startswith("https://"):
            continue
        page, _, anchor = target.partition("#")
        assert (ROOT / page).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), flags=re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_a_release_has_absolute_links(tmp_path):
    """PyPI shows README.md without the folder that its links are relative to."""
    for name in (".github/addresses.py", "README.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    home = "https://github.com/owner/repository"
    subprocess.run([sys.executable, tmp_path / ".github/addresses.py", home, "v1.2.3"], check=True)
    before, after = (links((where / "README.md").read_text()) for where in (ROOT, tmp_path))
    assert len(before) == len(after) > 20
    assert all(target.startswith("https://") for target in after)
    assert f"{home}/blob/v1.2.3/docs/quickstart.md" in after
    assert f"{home}/raw/v1.2.3/docs/figures/frontier.svg" in after
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == home
    assert "Paper" in project["urls"]


def test_the_oldest_versions_are_those_of_the_bounds():
    done = subprocess.run([sys.executable, ROOT / ".github/oldest.py"], capture_output=True, text=True, check=True)
    project = (ROOT / "pyproject.toml").read_text()
    pins = [pin.removesuffix(".*").split("==") for pin in done.stdout.split()]
    assert {"torch", "transformers", "lightning"} <= {name for name, _ in pins}
    assert all(f'"{name}>={version}' in project for name, version in pins)


def test_commands_in_docs_exist(capsys):
    """Every flag of ``lambdacgd …`` in a block is one that the command has."""
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            words = line.partition("#")[0].split()
            if words[:1] != ["lambdacgd"]:
                continue
            assert main([words[1], "--help"]) == 0, line
            known = capsys.readouterr().out
            assert all(word in known for word in words if word.startswith("--")), line


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: lambdacgd\.[\w.]*?(\w+)$", text, flags=re.M))
    assert {name for name in lc.__all__ if not name.startswith("__")} <= shown


@pytest.mark.parametrize("name", ["index", "quickstart", "settings", "epsilon", "lora"])
@pytest.mark.filterwarnings("ignore")
def test_main_pages_run(name, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / f"{name}.md"
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    for code in blocks(page, "python"):
        # A λ that is searched for takes seconds.
        exec(code.replace("epochs=5, epsilon=2.0,", "epochs=5, epsilon=2.0, mechanism=lc.LambdaCGD(0.6),"), known)
    if name == "quickstart":
        assert [repr(known["plan"]) + "\n"] == blocks(page, "text")
        assert float(capsys.readouterr().out.split("test accuracy ")[1].split("%")[0]) > 80
    if name == "epsilon":
        for asked in ({"noise_multiplier": 1.0}, {"epsilon": 2.0}):
            call = lc.epsilon if "noise_multiplier" in asked else lc.noise_multiplier
            answer = call(sampling_rate=0.05, steps=50, delta=1e-5, **asked)
            assert f"# {answer:.3f}\n" in page.read_text()


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
@pytest.mark.filterwarnings("ignore")
def test_first_programs_run(name, tmp_path, monkeypatch):
    """What these pages begin with is a whole program."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {"__name__": name}
    exec(blocks(ROOT / "docs" / f"{name}.md", "python")[0], known)
    assert list(tmp_path.rglob("release/PRIVACY.md"))
    if name == "lightning":  # and what it says of going on holds for that program
        (newest,) = tmp_path.rglob("*.ckpt")
        again = blocks(ROOT / "docs" / "lightning.md", "python")[0].replace('"release"', '"again"')
        exec(again.replace("strategy.loader)", f"strategy.loader, ckpt_path={str(newest)!r})"), {"__name__": name})


STEP = """        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def a_small_task() -> dict[str, Any]:
    """What the pages on training take as given."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(400, 20)
    model = torch.nn.Linear(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "torch": torch,
        "dataset": torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
    }


@pytest.mark.filterwarnings("ignore")
def test_the_training_page_runs(monkeypatch):
    logged: list[tuple[Any, ...]] = []
    writer = SimpleNamespace(add_scalar=lambda *value: logged.append(value))
    board = SimpleNamespace(SummaryWriter=lambda _: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    first, epochs, schedule, spent, watch, *_ = blocks(ROOT / "docs" / "training.md", "python")
    # A λ that is searched for takes seconds.
    first = first.replace("epochs=10, epsilon=2.0,", "epochs=2, epsilon=2.0, mechanism=lc.LambdaCGD(0.6),")
    begin, loop, step = first.partition("for batch in")
    known = a_small_task()
    for code in (loop + step, epochs.replace("        ...\n", STEP), schedule + spent, watch):
        exec(begin + code, known)
        assert known["private"].finished
        known["private"].detach()
    assert len(logged) == 2 * 3


@pytest.mark.filterwarnings("ignore")
def test_the_checkpoints_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, load, resume, _, release, read, earlier = blocks(ROOT / "docs" / "checkpoints.md", "python")
    known = a_small_task()
    known["plan"] = lc.plan(known["dataset"], 20, epochs=2, epsilon=2.0, delta=1e-4, mechanism=lc.LambdaCGD(0.6))
    known["build_model"] = lambda: a_small_task()["model"]
    exec(train.replace("        ...\n", STEP), known)
    assert known["private"].finished
    known["private"].detach()
    exec(load, known)
    known["private"].detach()
    exec(load.partition("# weights")[0] + resume + release, known)
    trained = known["model"].state_dict()
    exec(read, known)
    assert all(value.equal(trained[name]) for name, value in known["model"].state_dict().items())
    known["optimizer"] = known["torch"].optim.SGD(known["model"].parameters(), lr=0.1)
    exec(earlier.replace("first-release", "release"), known)
    assert known["private"].card()["earlier_runs"] == [{"epsilon": 2.0, "delta": 1e-4}]


@pytest.mark.parametrize("name", ["quickstart", "mechanisms", "lora"])
@pytest.mark.filterwarnings("ignore")
def test_notebooks_run(name):
    """The code of each notebook is that of the file it is made from, and runs."""
    spec = importlib.util.spec_from_file_location("build", NOTEBOOKS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    stored = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    sources = [("".join(cell["source"])) for cell in stored["cells"]]
    assert sources == [text for _, text in build.cells(NOTEBOOKS / f"{name}.py")], "run examples/notebooks/build.py"
    assert all(cell.get("outputs") is not None for cell in stored["cells"] if cell["cell_type"] == "code")
    made = build.build(NOTEBOOKS / f"{name}.py")
    assert any(cell.get("outputs") for cell in made["cells"])


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
