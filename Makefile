# Every target sets up .venv first when that is needed; `make` alone lists them.
SHELL := bash
.DEFAULT_GOAL := help
BIN := .venv/bin

ifndef RUN
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
endif

# Tests use tiny tensors: more threads than one only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup quickstart test test-all lint format bench peers oracles constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make or repair .venv (PYTHON=... chooses the interpreter)
	@scripts/setup.sh

quickstart: setup ## train a small model on this machine, with a check before and after
	@$(BIN)/posttrain train quickstart --run-dir $(RUN)
	@printf '\nThe run is in %s (summary.json, metrics.jsonl, checkpoints/).\n' '$(RUN)'
	@printf 'Next: source .venv/bin/activate, then posttrain --help, or another recipe of src/posttrain/recipes.\n'

test: lint ## lint and all quick tests, as CI runs them
	@printf 'Lint is clean. Quick tests now; make test-all runs the slow ones too.\n'
	@$(PYTEST) -m "not slow and not gpu" tests

test-all: lint ## test, and the slow tests (trains the shipped recipes)
	@$(PYTEST) -m "not gpu" tests

lint: setup ## ruff, its formatter, pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; echo 'lint: run make format'; exit 1; }
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## run the benchmarks, or one: make bench NAME=rollout (ARGS="--repeats 1")
	@for name in $(or $(NAME),$$($(BIN)/posttrain bench | cut -d ' ' -f 1)); do \
		echo "== $$name"; $(BIN)/posttrain bench "$$name" $(ARGS) || exit 1; done

peers: ## environments of what benchmarks compare with: TRL, vLLM (4 GB in .cache)
	@benchmarks/peers/setup.sh trl
	@benchmarks/peers/setup.sh vllm

oracles: ## compare our algorithms with those that verl, TRL and OpenRLHF publish
	@benchmarks/oracles/setup.sh
	@OMP_NUM_THREADS=1 PYTHONPATH=src .cache/oracles-venv/bin/python benchmarks/oracles/run.py

constraints: ## write constraints.txt anew from what the registry has today
	@scripts/constraints.sh

clean: ## remove what make made here: .venv, caches, builds (runs/ stays)
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis dist build
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
