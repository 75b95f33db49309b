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
