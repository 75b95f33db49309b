.PHONY: demo test lint docs slow clean
PYTHON ?= python3
BIN := .venv/bin

# One environment for everything; rebuilt when the package's metadata or the pins change.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: .venv/ready
	$(BIN)/lambdacgd demo

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude '*.md' .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/mkdocs build --strict

test: .venv/ready lint
	$(BIN)/python -m pytest

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .venv site out
