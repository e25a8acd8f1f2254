# Every target sets itself up: `make demo` and `make test` each work alone on a fresh clone.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
EXTRAS := test,bench,docs,train,gpu,torchrec,frameworks,s3,azure,gcs,metrics,ray,redis,watch
# Three workers on two cores: the tests start servers and training processes of their own, once per file, and wait for
# them. Therefore a file stays on one worker, and files keep their order: the last folder has short ones, so all workers
# end together.
WORKERS ?= 3
DEMO_ARGS ?=
SUITES ?=
QUICK ?=
MUTANTS ?=
PYTHONS ?= 3.12 3.13
GPU_PYTHON ?= python3

# The tests start hundreds of interpreters: without bytecode each would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo serve-demo test test-pythons check lint types bytecode suite azurite redis bench gpu docs soak dist-check mutants clean

help:
	@echo "make demo   train, kill, restore and finish a small model; leaves a store to look at"
	@echo "make serve-demo  train, compact, serve and learn on one store while processes are killed"
	@echo "make test   lint, types and all tests"
	@echo "make test-pythons  the same on each other Python that this machine has (PYTHONS=\"3.12 3.13\")"
	@echo "make check  lint and types only"
	@echo "make bench  run all benchmarks and write build/bench/report.md (SUITES=\"size cost\", QUICK=1, MODEL=\"zipf300/adam\")"
	@echo "make gpu    tests, memory checker and benchmarks on a GPU, in 40 minutes: build/gpu/report.md (GPU_PYTHON=python of an environment with torch for CUDA)"
	@echo "make docs   build the documentation as a site: build/site/index.html"
	@echo "make soak   the full counts of the crash and property sweeps"
	@echo "make dist-check  build sdist and wheel, install them in a fresh environment, run the README and mypy there"
	@echo "make mutants  break one safety rule at a time and see that a test notices (MUTANTS=\"--area log\")"
	@echo "make clean  remove the environment, caches and build results"

setup: $(VENV)/.stamp

# setuptools comes first and from the pinned set, so that building this package (no isolation) needs nothing unpinned.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchrec fbgemm-gpu-cpu
	@$(BIN)/python -c 'import os, sys, torch; cpu = torch.__version__.endswith("+cpu"); note = f"torch {torch.__version__} is not the CPU build that the tests were pinned with"; cpu or print("warning:", note, file=sys.stderr); sys.exit(not cpu and os.environ.get("CI") == "true")'
	@touch $@

demo: $(VENV)/.stamp
	$(BIN)/cnr demo $(DEMO_ARGS)

serve-demo: $(VENV)/.stamp
	$(BIN)/python -m tests.serving.soak $(DEMO_ARGS)

check: lint types

lint: $(VENV)/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Its minute of a core is what the tests leave: they wait for processes and servers.
types: $(VENV)/.stamp
	nice -n 5 $(BIN)/mypy

# Without npm's registry the Azure tests skip and say so; everything else runs.
azurite: $(VENV)/.stamp
	@if [ -f tests/install_azurite.py ]; then \
	  $(BIN)/python tests/install_azurite.py || echo "warning: Azurite was not installed; its tests will be skipped" >&2; \
	fi

# A package of the system: only root can install it. Without it the Redis tests skip and say so.
redis:
	@command -v redis-server > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
	  && { apt-get install -y -qq redis-server || { apt-get update -qq && apt-get install -y -qq redis-server; }; } > /dev/null 2>&1; } \
	  || echo "warning: redis-server is not installed (Debian: apt-get install redis-server); its tests will be skipped" >&2

# Workers that collect at the same time would each compile every test.
bytecode: $(VENV)/.stamp
	-@$(BIN)/python -m pytest -qq --collect-only tests > /dev/null

# Only what the workers would each do themselves comes ahead of them.
suite: azurite redis bytecode
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

test: lint
	$(MAKE) --no-print-directory --jobs 5 types suite

# An environment for each. CI=: here torch may be another build than the pinned one; the set-up warns.
test-pythons:
	@for version in $(PYTHONS); do \
	  if python$$version -c '' 2> /dev/null; then \
	    $(MAKE) CI= VENV=.venv-$$version PYTHON=python$$version test || exit 1; \
	  else echo "python$$version is not on this machine: not tested"; fi; \
	done

bench: $(VENV)/.stamp
	$(BIN)/python tests/benchmarks/suites.py $(if $(QUICK),--quick) $(SUITES) $(if $(MODEL),--model $(MODEL))

# In an environment of the caller's: the pinned one has a torch without CUDA.
gpu:
	PYTHONPATH=.:gpu:tools $(GPU_PYTHON) -m tests.gpu.run

docs: $(VENV)/.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html; with its search: $(BIN)/python -m http.server -d build/site"

soak: $(VENV)/.stamp azurite redis
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "soak or slow" --timeout 0 tests

dist-check: $(VENV)/.stamp
	$(BIN)/python -m pytest -q -m "soak or not soak" tests/house/test_distribution.py

mutants: $(VENV)/.stamp redis
	$(BIN)/python -m tests.mutants.run $(MUTANTS)

clean:
	rm -rf $(VENV) .venv-* .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
