PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint format

demo: .venv/installed          ## install, then train a small GPT over a slow link with DDP, its hooks and fxcomp
	$(BIN)/fxcomp demo

test: .venv/installed          ## install, then run the fast tests: within ten minutes on two cores
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: .venv/installed      ## run the slow tests too
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --slow

lint: .venv/installed          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@echo 'Installing into .venv, which takes minutes the first time.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'from fxcomp.compressors import kernels; print(kernels.describe())'
	touch $@
