# Two doors: `make run` answers on http://127.0.0.1:8080/v1, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions this release was tested with. `PIP_FLAGS=` lifts the pins.
PIP_FLAGS ?= -c constraints.txt
CODE := router edge_engine cloud_engine engine_core policies
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help run venv check test peers clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: $(VENV)/.runtime ## install what is needed, fetch and build the model, start the daemon
	@$(BIN)/tidegate serve

venv: $(VENV)/.dev ## everything for development and tests in .venv

check: venv ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: venv ## every test, with branch coverage
	$(BIN)/python -m pytest --cov --cov-branch --cov-report=term:skip-covered

peers: venv ## what benchmarks/edge_peers.py compares with, in .peers (2.5 GB, 10 minutes)
	@$(BIN)/python benchmarks/make_peers.py

clean: ## remove .venv and caches of tools (not the models)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidegate needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing the router and both engines into $(VENV) (once; PyTorch is the large part) ...'
	@$(PIP_INSTALL) -e '.[edge,cloud]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing everything for development into $(VENV) ...'
	@$(PIP_INSTALL) --quiet -e '.[dev]'
	@touch $@
