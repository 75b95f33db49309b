"""Turn the ``.py`` files beside this one into notebooks, run them, and store what they print and draw.

    python examples/notebooks/build.py              # all of them
    python examples/notebooks/build.py quickstart

A file is cut into cells by lines ``# %%`` (code) and ``# %% [markdown]`` (text, as comments). No Jupyter is needed.
Where one is installed, the notebooks open there as usual; edit the ``.py`` file, not the notebook.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Cell = tuple[str, str]


def cells(path: Path) -> list[Cell]:
    """The cells of a file, as ("markdown" or "code", text)."""
    found: list[Cell] = []
    for part in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip("\n"), flags=re.M)))
        else:
            found.append(("code", body.strip("\n")))
    return found


def run(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell like a notebook does: what it prints, and the value of its last expression, are its outputs."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": _shown(value)}
        )
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80)
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    elif hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def build(path: Path) -> dict[str, Any]:
    """The notebook of a file, run in a folder of its own."""
    made, names, count = [], {"__name__": "__main__"}, 0
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, (kind, text) in enumerate(cells(path)):
                cell: dict[str, Any] = {
                    "cell_type": kind,
                    "id": f"cell-{number}",
                    "metadata": {},
                    "source": _lines(text),
                }
                if kind == "code":
                    count += 1
                    outputs = run(text, names)
                    for output in outputs:
                        if "execution_count" in output:
                            output["execution_count"] = count
                    cell |= {"execution_count": count, "outputs": outputs}
                made.append(cell)
        finally:
            os.chdir(before)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    for source in sorted(HERE.glob("*.py")):
        if source.name != "build.py" and (not sys.argv[1:] or source.stem in sys.argv[1:]):
            target = source.with_suffix(".ipynb")
            target.write_text(json.dumps(build(source), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(target.relative_to(HERE.parent.parent))
