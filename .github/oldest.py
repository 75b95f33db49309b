"""Prints the oldest versions that pyproject.toml allows, as requirements for pip. The CI tests with these."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["hf"], *extras["lightning"]]:
    bound = re.match(r"([\w-]+)>=([\d.]+)", requirement)
    assert bound, f"{requirement} has no lower bound"
    print(f"{bound[1]}=={bound[2]}.*")
