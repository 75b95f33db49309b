.PHONY: demo test lint docs slow clean
PYTHON ?= python3
BIN := .venv/bin

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# One environment, in two layers; both are rebuilt when the package's metadata or the pins change.
# The library alone: what the demo needs.
.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

# Everything: tests, linters, docs, integrations, and what reproduce/ uses.
.venv/ready: .venv/core
	$(PIP) -e '.[dev]'
	touch $@

demo: .venv/core
	$(BIN)/lambdacgd demo

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude '*.md' .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/mkdocs build --strict

# One process a core, each with one thread: numbers do not depend on how many cores there are.
test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .venv site out
