# `make step` goes from a fresh clone to a profiled training step; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# stamps: written when an installation is through; a later change of what was installed makes them stale
RUNTIME := $(VENV)/.installed-runtime
EVERYTHING := $(VENV)/.installed-everything

STEP_ARGS ?= --model llama3.2-1b --liger flce
# Python for the browser, from npm
PYODIDE := 314.0.7
PYTEST_ARGS ?= -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install step test test-long test-slow browser check format docs calculator chromium clean

help:
	@echo "make step      profile a training step: ligerprof step $(STEP_ARGS)"
	@echo "make install   install the package, every extra that tests need, and the linters into $(VENV)"
	@echo "make test      run the tests that need no GPU"
	@echo "make test-long run the tests that are left out of make test for their time; continuous integration runs them, too"
	@echo "make test-slow run the slowest tests, and more drawn examples"
	@echo "make browser   install Chromium where that is possible, and run the tests of the pages in it"
	@echo "make check     ruff, formatting and mypy"
	@echo "make docs      build the documentation into site/, and check its links"
	@echo "make calculator the same with the calculator's Python, which npm fetches"
	@echo "make format    let ruff rewrite what it can"
	@echo "make clean     remove $(VENV) and caches; runs/ stays"

install: $(EVERYTHING)

step: $(RUNTIME)
	$(BIN)/ligerprof step $(STEP_ARGS)

test: $(EVERYTHING)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(EVERYTHING)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "long and not gpu and not slow"

test-slow: $(EVERYTHING)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "slow or hypothesis" --hypothesis-profile thorough

browser: chromium calculator
	$(BIN)/python -m pytest -n 0 tests/reports/page/test_browser.py tests/test_calculator.py

chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { [ "$$(id -u)" = 0 ] \
		&& apt-get update && apt-get install --yes --no-install-recommends chromium; } \
		|| { echo "Error: no Chromium on the path. As root: apt-get install chromium" >&2; exit 1; }

check: $(EVERYTHING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(EVERYTHING)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(EVERYTHING)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

calculator: docs
	mkdir -p site/calculator/pyodide
	cd site/calculator/pyodide && npm pack --silent pyodide@$(PYODIDE) && tar -xzf pyodide-$(PYODIDE).tgz --strip-components=1 \
		$(addprefix package/,pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json) \
		&& rm pyodide-$(PYODIDE).tgz
	node site/calculator/snapshot.mjs

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ligerprof tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Error: $(PYTHON) is older than Python 3.10. Name another: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorboard]'
	touch $@

$(EVERYTHING): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorboard,peft,peers,mcp,test,dev,docs]'
	touch $(RUNTIME) $@
