"""Writes the addresses that only the hosting site knows into what a package index shows.

Links in README.md are relative, so that they work in any checkout and any fork. A package index has no folder to
look them up in, so a release makes them absolute, and adds the repository to [project.urls]:

    python .github/addresses.py https://github.com/owner/repository v0.1.0

The release workflow calls it with the address of the repository that it runs in. It changes files in place.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def absolute(text: str, repository: str, tag: str) -> str:
    """Markdown with absolute links: pages as the site shows them, pictures as they are."""

    def link(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", link, text)


def urls(project: str, repository: str, tag: str) -> str:
    """pyproject.toml with the repository's addresses in [project.urls]."""
    known = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in known.items())
    assert project.count("[project.urls]\n") == 1, "pyproject.toml has no [project.urls]"
    return project.replace("[project.urls]\n", "[project.urls]\n" + lines)


if __name__ == "__main__":
    for name, change in {"README.md": absolute, "pyproject.toml": urls}.items():
        path = ROOT / name
        path.write_text(change(path.read_text(), *sys.argv[1:]))
