# make help says what there is. Everything happens in .venv; PYTHON chooses the interpreter to make it.

PYTHON ?= python3
DEMO_OUTPUT ?= demo_output
DTYPE ?=
DEMO_ARGS ?=
PYTEST_ARGS ?= -q -n 2

BIN := .venv/bin
CONSTRAINTS := build_scripts/constraints.txt
READY := .venv/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint clean

help: ## Say what there is (the default)
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the pinned packages

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.10; try: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making .venv and installing the pinned packages (a few minutes, most of it torch)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(READY) ## Run the demo on a real model (DTYPE=float32, DEMO_OUTPUT=folder, DEMO_ARGS=more)
	@$(BIN)/dustin-trt demo --output $(DEMO_OUTPUT) $(if $(DTYPE),--dtype $(DTYPE)) $(DEMO_ARGS)

test: $(READY) ## Fetch the test model and text, then run the tests (PYTEST_ARGS="-q --durations=10")
	@$(BIN)/python -m dustin_trt.evaluation.assets
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY) ## Check style, formatting, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

clean: ## Remove .venv, caches and demo output (downloaded assets stay)
	@rm -rf .venv $(DEMO_OUTPUT) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
