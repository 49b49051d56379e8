# Two commands do everything: make demo, make test. Both need Python 3.11+, Java 17+ and make.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit contract property integration chaos soak fetch clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## Make .venv with everything that uv.lock pins

.venv/.ready: pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11" >&2; echo "  try: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv sync --frozen --quiet --inexact --compile-bytecode --python $(BIN)/python
	@touch $@

demo: setup ## Sync a small shop to four stores on real servers, and compare (DEMO_SECONDS=60 ends it)
	@$(BIN)/python -m deploy.demo

test: lint unit ## Check everything, on real servers
	@$(BIN)/python -m pytest --hypothesis-profile=ci tests/contract tests/property tests/integration

lint: setup ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

unit: setup ## Run the tests that need no server
	@$(BIN)/python -m pytest tests/unit -q

contract: setup ## Run one suite against every sink
	@$(BIN)/python -m pytest tests/contract

property: setup ## Play many scripts of changes, crashes and replays against some sinks
	@$(BIN)/python -m pytest --hypothesis-profile=ci tests/property

integration: setup ## Run everything from PostgreSQL to the sinks
	@$(BIN)/python -m pytest tests/integration

chaos: setup ## Hurt a whole pipeline a little, and watch that it never shows
	@$(BIN)/python -m pytest tests/chaos

soak: setup ## Hurt a whole pipeline for SOAK_MINUTES (30), and count violations
	@$(BIN)/python -m tests.chaos.soak

fetch: setup ## Fetch the servers and jars now, to work without a network later
	@$(BIN)/python -m deploy.stack fetch

clean: ## Remove what was built here (the cache of servers stays)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
