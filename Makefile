PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-recipes test-builds lint format site

# The builds of torch that test-builds makes an environment for: a version, which takes what pip takes on an ordinary
# machine (the CUDA build on Linux), or `pinned`, which takes what constraints.txt and pip's own settings say.
BUILDS ?= pinned 2.13.0

# The package of compressors that tests import too.
MORE := $(addprefix examples/more_compressors/,pyproject.toml setup.py fxcomp_more/chunkmax.cpp)

# Tests start many processes, and each would compile the modules that it loads.
unexport PYTHONDONTWRITEBYTECODE

demo: .venv/installed          ## install, then train a small GPT over a slow link with DDP, its hooks and fxcomp
	$(BIN)/fxcomp demo

test: .venv/installed          ## install, then run the fast tests: within ten minutes on two cores
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: .venv/installed      ## run the slow tests too, and those of benchmarks and recipes
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --slow

test-recipes: .venv/installed  ## install the libraries that recipes are for, and run those tests, the slow ones too
	$(BIN)/pip install -q -c constraints.txt -e '.[recipes]'
	$(BIN)/python -m pytest -q --slow tests/recipes

test-builds: $(BUILDS:%=test-build-%)  ## run the fast tests with each of BUILDS; "make test-builds BUILDS='2.11.0 2.12.0'"

test-build-pinned: test ;

test-build-%: .venv-%/installed
	.venv-$*/bin/python -m pytest -q -n 2 --dist worksteal

lint: .venv/installed          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

site: .venv/installed          ## the documentation as a site for a browser, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo 'Open build/site/index.html, or see it with its search: $(BIN)/python -m http.server -d build/site'

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*) $(MORE)
	@echo 'Installing into .venv, which takes minutes the first time.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps --no-build-isolation -e examples/more_compressors
	$(BIN)/python -c 'from fxcomp.compressors import kernels; print(kernels.describe())'
	touch $@

.PRECIOUS: .venv-%/installed

# torch's own versions ask for other versions of setuptools than ours.
.venv-%/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*) $(MORE)
	@echo 'Installing torch $* into .venv-$*, which takes minutes and gigabytes the first time.'
	$(PYTHON) -m venv .venv-$*
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > .venv-$*/constraints.txt
	PIP_FIND_LINKS= PIP_CONFIG_FILE=/dev/null .venv-$*/bin/pip install -q -c .venv-$*/constraints.txt torch==$* -e '.[dev]'
	.venv-$*/bin/pip install -q --no-deps --no-build-isolation -e examples/more_compressors
	touch $@
