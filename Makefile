# Two commands matter: `make demo` and `make test`. Both install what they need, and can be run again.

PYTHON ?= python3
VENV := .venv
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
LOCK ?= .ci/locks/cpu-$(TAG).txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := .cache/models/smollm2-135m
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install model demo lint format test chaos models mutations sweep sweeps soak clean

help: ## say what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED) ## make .venv from the exact lock

$(INSTALLED): $(LOCK) pyproject.toml
	PYTHON=$(PYTHON) .ci/install $(VENV) $(LOCK)
	@touch $@

.ci/locks/%.txt:
	@echo "There is no $@: this interpreter has no exact lock yet." >&2
	@echo "Choose another (make PYTHON=python3.11), or see docs/install.md." >&2
	@exit 2

model: $(MODEL)/complete.json ## prepare the demo's model, SmolLM2-135M, once

$(MODEL)/complete.json: | $(INSTALLED)
	$(BIN)/python -m capture.checkpoints smollm2 $(MODEL)

demo: install model ## capture the example prompts, read a slice, draw a pattern
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

sweep: install ## run examples/sweep.yaml, kill it five times, check every byte
	$(BIN)/python examples/kill_sweep.py --report docs/sweeps.md

sweeps: install ## ten minutes of such sweeps, struck in every way there is
	$(BIN)/python examples/kill_sweep.py --minutes 10 --report docs/sweeps.md

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## let ruff format the tree
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint model ## lint, then every test that this machine can run in minutes
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not gpu and not chaos" $(PYTEST_ARGS)

chaos: install ## strike at real runs in every way there is and write docs/chaos.md
	$(BIN)/python -m tests.jobs.chaos_report $(PYTEST_ARGS)

soak: install ## race and kill writers for ten minutes on each back end and write docs/soak.md
	$(BIN)/python -m tests.store.soak_report $(PYTEST_ARGS)

models: install ## put every family of models through its checks and write docs/models.md
	$(BIN)/python -m tests.capture.models_report

mutations: install ## plant a bug in each attention semantic and see the checks fail
	$(BIN)/python -m tests.mutations

clean: ## remove what the demo and the tools wrote; .venv and .cache stay
	rm -rf demo-run demo-run.png demo-out sweep-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
